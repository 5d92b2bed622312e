"""How fast this node is: a second of matrix products, of copies in memory, and of writing to and reading from its disk.

New memory is timed beside it, in pages of both sizes.

Invariants: the best of many rounds counts, because other load can only make a round slower; the median beside it says
how much there was. Nothing is judged here. A node is slow only beside others of its kind (`judge.slow_nodes`).
Nothing takes a large part of memory or disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

from mpitrain.doctor.checks import Seen, Wanted, directory
from mpitrain.doctor.cores import share_throttled, throttled_periods
from mpitrain.doctor.judge import FIGURES, told
from mpitrain.system.memory import available_bytes, huge_pages

_SIDE = 1024  # of the matrices: 2 GFLOP a product
_COPIED_BYTES = 2**28  # larger than a processor's caches
_NEW_BYTES, _PRIVATE = 2**26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_BLOCK_BYTES = 2**24
_MOST_DISK_BYTES = 2**30


def check_speed(wanted: Wanted) -> Seen:
    """Figures by name, larger is better; each takes `wanted.speed_s`."""
    before = throttled_periods()
    rates = {
        "matmul_gflop_per_s": _matmul(wanted.speed_s),
        "memory_gb_per_s": _memory(wanted.speed_s),
        **_disk(directory(wanted.disk), wanted.speed_s),
    }
    best = {name: max(values) for name, values in rates.items()}
    texts = [
        f"{FIGURES[name].label} {told(name, best[name])} (median {told(name, statistics.median(values))})"
        for name, values in rates.items()
    ]
    texts.append(_new_memory(wanted.speed_s))
    if held := share_throttled(before, throttled_periods()):
        texts.append(f"its control group held it up in {held:.0%} of the time slices")
    return Seen(", ".join(texts), best)


def best_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest of `times`."""
    return min(times(work, seconds))


def times(work: Callable[[], object], seconds: float) -> list[float]:
    """How long `work` takes, repeated for so long, at least three times; the first is to warm up."""
    work()
    found, ends_s = list[float](), time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < ends_s:
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return found


def _matmul(seconds: float) -> list[float]:
    import torch

    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    return [2 * _SIDE**3 / s / 1e9 for s in times(lambda: torch.mm(left, right, out=out), seconds)]


def _memory(seconds: float) -> list[float]:
    import torch

    size = int(max(2**20, min(_COPIED_BYTES, available_bytes(1) / 16)))
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return [2 * size / s / 1e9 for s in times(lambda: target.copy_(source), seconds)]


def _new_memory(seconds: float) -> str:
    """How fast the kernel hands out memory, which large tensors need anew again and again, in small and in huge pages;
    with who is given huge ones."""
    gb_per_s = []
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):

        def touch(advice: int = advice) -> None:
            with mmap.mmap(-1, _NEW_BYTES, flags=_PRIVATE) as memory:
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    memory.madvise(advice)
                memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)

        gb_per_s.append(_NEW_BYTES / best_s(touch, seconds / 4) / 1e9)
    setting = huge_pages() or "not known"
    way_out = ": steps of large models take longer" if setting == "never" else ""
    small, huge = gb_per_s
    return f"new memory {small:.1f} GB/s, asked for in huge pages {huge:.1f} (the kernel's setting: {setting}{way_out})"


def _disk(folder: str, seconds: float) -> dict[str, list[float]]:
    """Whole blocks to the disk and back, not to the system's cache."""
    block = os.urandom(_BLOCK_BYTES)
    system = os.statvfs(folder)
    most = min(_MOST_DISK_BYTES, system.f_bavail * system.f_frsize // 4)
    num_blocks = max(1, most // _BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, prefix="mpitrain-doctor-") as file:
        write, read = list[float](), list[float]()
        ends_s = time.perf_counter() + seconds
        while len(write) < num_blocks and (not write or time.perf_counter() < ends_s):
            began_s = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write.append(_BLOCK_BYTES / (time.perf_counter() - began_s) / 1e6)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        ends_s = time.perf_counter() + seconds
        for number in range(len(write)):
            if number and time.perf_counter() > ends_s:
                break
            began_s = time.perf_counter()
            file.read(_BLOCK_BYTES)
            read.append(_BLOCK_BYTES / (time.perf_counter() - began_s) / 1e6)
    return {"disk_write_mb_per_s": write, "disk_read_mb_per_s": read}
