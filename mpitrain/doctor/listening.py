"""Where a rank and what has started it listen for connections, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_LISTENS = "0A"


def listening() -> list[str]:
    """ "rank 127.0.0.1:4711", "prterun 0.0.0.0:815": of this process, and of those above it that are of our user."""
    places, found, pid = _places(), list[str](), os.getpid()
    seen: set[str] = set()
    while pid > 1:
        try:
            name, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
            open_files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            break
        who = "rank" if pid == os.getpid() else name.split("(", 1)[1]
        own = {places[one[8:-1]] for one in open_files if one.startswith("socket:[") and one[8:-1] in places}
        found += [f"{who} {place}" for place in sorted(own - seen)]
        seen |= own
        pid = int(rest.split()[1])
    return found


def _places() -> dict[str, str]:
    """The address and port of every listening socket, by its inode."""
    places = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    places[words[9]] = _address(words[1])
    return places


def _address(text: str) -> str:
    host, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    if len(packed) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"
