"""How fast this node is: a second of matrix products, of copies in memory, and of writing to and reading from its disk.

Invariants: the best of many rounds counts, because other load can only make a round slower; nothing is judged here. A
node is slow only beside others of its kind (`judge.slow_nodes`). Nothing takes a large part of memory or disk.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from mpitrain.doctor.checks import Seen, Wanted, directory
from mpitrain.doctor.judge import FIGURES, told
from mpitrain.system.memory import available_bytes

_SIDE = 1024  # of the matrices: 2 GFLOP a product
_COPIED_BYTES = 2**28  # larger than a processor's caches
_BLOCK_BYTES = 2**24
_MOST_DISK_BYTES = 2**30


def check_speed(wanted: Wanted) -> Seen:
    """Figures by name, larger is better; each takes `wanted.speed_s`."""
    figures = {
        "matmul_gflop_per_s": _matmul(wanted.speed_s),
        "memory_gb_per_s": _memory(wanted.speed_s),
        **_disk(directory(wanted.disk), wanted.speed_s),
    }
    return Seen(
        ", ".join(f"{FIGURES[name].label} {told(name, value)}" for name, value in figures.items()), figures
    )


def best_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest time of `work`, repeated for so long, at least three times; the first is to warm up."""
    work()
    least_s, ends_s, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < ends_s:
        began_s = time.perf_counter()
        work()
        least_s = min(least_s, time.perf_counter() - began_s)
        rounds += 1
    return least_s


def _matmul(seconds: float) -> float:
    import torch

    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    return 2 * _SIDE**3 / best_s(lambda: torch.mm(left, right, out=out), seconds) / 1e9


def _memory(seconds: float) -> float:
    import torch

    size = int(max(2**20, min(_COPIED_BYTES, available_bytes(1) / 16)))
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return 2 * size / best_s(lambda: target.copy_(source), seconds) / 1e9


def _disk(folder: str, seconds: float) -> dict[str, float]:
    """Whole blocks to the disk and back, not to the system's cache."""
    block = os.urandom(_BLOCK_BYTES)
    system = os.statvfs(folder)
    most = min(_MOST_DISK_BYTES, system.f_bavail * system.f_frsize // 4)
    num_blocks = max(1, most // _BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, prefix="mpitrain-doctor-") as file:
        write, read, written = 0.0, 0.0, 0
        ends_s = time.perf_counter() + seconds
        while written < num_blocks and (not written or time.perf_counter() < ends_s):
            began_s = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write = max(write, _BLOCK_BYTES / (time.perf_counter() - began_s))
            written += 1
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        ends_s = time.perf_counter() + seconds
        for number in range(written):
            if number and time.perf_counter() > ends_s:
                break
            began_s = time.perf_counter()
            file.read(_BLOCK_BYTES)
            read = max(read, _BLOCK_BYTES / (time.perf_counter() - began_s))
    return {"disk_write_mb_per_s": write / 1e6, "disk_read_mb_per_s": read / 1e6}
