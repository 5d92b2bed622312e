"""torch's gloo, the peer of most benchmarks: its set-up on one host and between emulated ones, and its end."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any


def never_destroyed(*objects: Any) -> None:
    """Keep groups of torch's gloo, and what holds them, for as long as the process lives.

    torch 2.13 destroys such a group by joining its threads with Python's lock held, and a thread that just then lets go
    of its last work waits for that lock: the process hangs, under load once in some tens of times.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def start_gloo(runtime: Any) -> Any:
    """torch's default group over gloo and all ranks, by the network that leads to other hosts; never destroyed."""
    import torch.distributed as dist

    address, port = my_address(runtime), 0
    if runtime.num_nodes > 1:  # emulated hosts have no names to look up
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(address))
    if runtime.rank == 0:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    host, port = runtime.broadcast([address, port])
    store = dist.TCPStore(host, port, runtime.size, runtime.rank == 0)
    dist.init_process_group("gloo", store=store, rank=runtime.rank, world_size=runtime.size)
    never_destroyed(dist.group.WORLD)
    return dist.group.WORLD


def my_address(runtime: Any) -> str:
    """This host's address on the network that leads to the others."""
    if runtime.num_nodes == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255" if "MPITRAIN_LINK_RATE" not in os.environ else "10.78.0.254", 9))
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """The name of the network interface that has this address."""
    import fcntl
    import struct

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
        if socket.inet_ntoa(found[20:24]) == address:
            return name
    raise RuntimeError(f"no interface has {address}")
