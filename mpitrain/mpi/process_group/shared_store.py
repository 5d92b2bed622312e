"""torch's store for the ranks that MPI started: rank 0 serves it, and nobody connects who does not use it.

Invariants: no group of ours needs it. On one node it listens on the loopback interface alone; its keys lie under a
prefix that rank 0 drew and MPI told the others, so another job's store at the same place is not taken for it.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mpitrain.mpi.runtime import Runtime

Place = tuple[str, int, str]  # host, port, prefix

# Names by which torch calls a store that Python has made, and by which Python does.
_SAME = (
    "set", "get", "add", "wait", "check", "compare_set", "append", "multi_get", "multi_set", "num_keys", "delete_key",
    "has_extended_api", "clone",
)  # fmt: skip
_CALLED = {**dict(zip(_SAME, _SAME, strict=True)), "getNumKeys": "num_keys", "deleteKey": "delete_key"}


class SharedStore(dist.Store):
    """A store that is made when it is first used.

    Args:
        connect: makes it.
    """

    def __init__(self, connect: Callable[[], dist.Store]):
        super().__init__()
        self.connected = functools.cache(connect)


def _forwarding(name: str) -> Callable[..., Any]:
    def call(self: SharedStore, *arguments: Any) -> Any:
        store = self.connected()
        store.set_timeout(self.timeout)  # type: ignore[attr-defined]
        return getattr(store, name)(*arguments)

    return call


for _called, _name in _CALLED.items():
    setattr(SharedStore, _called, _forwarding(_name))


def served(runtime: Runtime) -> tuple[dist.TCPStore, Place]:
    """On rank 0: the store that it serves on a port that the system chose, and where. Where there are several nodes the
    others reach it by MASTER_ADDR, if that is set here, and by this host's name otherwise."""
    local = runtime.num_nodes == 1
    host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR", socket.gethostname())
    if not local:
        store = dist.TCPStore(host, 0, runtime.size, is_master=True, wait_for_workers=False)
    else:  # torch's own listens on every network
        with socket.create_server((host, 0)) as listener:
            store = dist.TCPStore(
                host, listener.getsockname()[1], runtime.size, is_master=True, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
    return store, (host, store.port, secrets.token_hex(8))


def connecting(runtime: Runtime, place: Place) -> dist.TCPStore:
    """On another rank: what rank 0 serves there."""
    return dist.TCPStore(place[0], place[1], runtime.size, is_master=False)
