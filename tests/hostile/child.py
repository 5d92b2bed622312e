"""Runs hostile cases one after the other in a process of its own, and tells after each what became of it.

    python -m tests.hostile.child OUTSIDE < cases > outcomes

A case is one JSON line {"name", "act", "words"}; before it a line {"begun"} is printed and after it an outcome: exit
code, what was printed, the peak of memory meanwhile, and what happened to the files in OUTSIDE, by the kernel's own
account (inotify), so that reads by C libraries count too.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

ADDRESS_SPACE = 16 << 30  # a process that takes what a file declares ends in a MemoryError
CASE_S = 60  # a deadline against hangs


class Watch:
    """What is done to the files of a folder."""

    def __init__(self, folder: str):
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK)
        for place in [folder, *(path for path, _, _ in os.walk(folder))]:
            # opened, read, changed, made, moved, removed; looking at a folder's list is none of these
            assert libc.inotify_add_watch(self._handle, place.encode(), 0x1 | 0x2 | 0x4 | 0x20 | 0xFC0) >= 0

    def happened(self) -> list[str]:
        """Names of files that something was done to since the last call."""
        names, data = [], b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._handle, 1 << 20)
        while data:
            mask, length = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
            name = data[16 : 16 + length].rstrip(b"\0").decode(errors="replace")
            if not mask & 0x40000000:  # of a folder
                names.append(f"{name} ({mask:#x})")
            data = data[16 + length :]
        return names


def checkpoint(words: list[str]) -> int:
    """Load the newest checkpoint of a run directory, with all its parts."""
    from mpitrain.checkpoint import newest, read_part
    from mpitrain.errors import MpitrainError

    try:
        found = newest(Path(words[0]))
        for part in found.parts if found else ():
            read_part(found.folder, part)
    except MpitrainError as error:
        print(f"mpitrain: error: {error}", file=sys.stderr)
        return 1
    return 0


def read(words: list[str]) -> int:
    """Read all samples of shards as a job does."""
    from mpitrain.data import Shards
    from mpitrain.errors import DataError

    try:
        source = Shards(words[0], max_gib=0.25)
        with source.reader(source.scan(), 0) as reader:
            for _ in reader.sequential(64):
                pass
    except DataError as error:
        print(f"mpitrain: error: {error}", file=sys.stderr)
        return 2
    return 0


def peak_mib() -> int:
    """Peak of resident memory since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _too_late(*_: object) -> None:
    raise TimeoutError("the case took too long")


def main() -> None:
    """Run the cases that stdin holds."""
    import h5py  # noqa: F401
    import PIL.Image  # noqa: F401
    import pyarrow.csv
    import pyarrow.parquet
    import torch

    from mpitrain.cli.main import main as command

    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = Watch(sys.argv[1])
    signal.signal(signal.SIGALRM, _too_late)
    tell = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps({"begun": case["name"]}), file=tell, flush=True)
        said, code = io.StringIO(), 99
        forget_peak()
        before = peak_mib()
        signal.alarm(CASE_S)
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                acts = {
                    "command": command,
                    "checkpoint": checkpoint,
                    "read": read,
                    "abort": lambda words: os.abort(),
                }
                code = acts[case["act"]](case["words"])
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
        signal.alarm(0)
        outcome = {
            "name": case["name"],
            "code": code,
            "said": said.getvalue()[-4000:],
            "outside": watch.happened(),
        }
        print(json.dumps(outcome | {"mib": peak_mib() - before}), file=tell, flush=True)


if __name__ == "__main__":
    main()
