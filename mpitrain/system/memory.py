"""How much memory a process may still take, where freed memory goes, and in which pages large tensors lie.

Invariants: what cannot be found out limits nothing. Standard library only; Linux with glibc, and elsewhere nothing is
done.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpitrain.system.control_groups import groups_around

LARGE_BLOCK_BYTES = 2**20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_TORCH_HUGE = "THP_MEM_ALLOC_ENABLE"
_M_MMAP_THRESHOLD = -3
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(num_sharing: int) -> float:
    """What this process may still take, where `num_sharing` processes like it share the machine."""
    found = [math.inf]
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            found.append(max(0, soft - _kilobytes("/proc/self/status", used, 0.0) * 1024))
    free = [_kilobytes("/proc/meminfo", "MemAvailable", math.inf) * 1024, *left_in_groups()]
    return min(found + [one / num_sharing for one in free])


def peak_bytes() -> int:
    """The most that this process has had in memory at once, so far; 0: not known."""
    return int(_kilobytes("/proc/self/status", "VmHWM", 0.0)) * 1024


def resident_bytes() -> int:
    """What this process has in memory now; 0: not known."""
    return int(_kilobytes("/proc/self/status", "VmRSS", 0.0)) * 1024


def _kilobytes(path: str, name: str, otherwise: float) -> float:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return otherwise
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name}:")), otherwise)


def left_in_groups() -> Iterator[float]:
    """What the control groups of this process, of either version, and those around them may still take: cached files
    that nobody has used for a while count as free, because they make room."""
    for folder, version in groups_around("memory"):
        limit, used, cached = _NAMES[version]
        try:
            free = float((folder / limit).read_text()) - float((folder / used).read_text())
            yield max(0.0, free + _statistic(folder / "memory.stat", cached))
        except (OSError, ValueError):  # none there, or no limit
            continue


def _statistic(path: Path, name: str) -> float:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0.0
    return next((float(words[1]) for words in lines if words[:1] == [name]), 0.0)


def give_large_blocks_back() -> bool:
    """From now on let memory of large tensors go back to the system when they are freed. By itself glibc keeps blocks
    of up to 32 MB, and small ones that live on fill the gaps, so that large ones need new memory again and again.
    It lasts until the process ends. False where the user has set this, or there is no such setting."""
    tunables = os.environ.get(_TUNABLES, "")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc.mmap_threshold" in tunables:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES))
    except (OSError, AttributeError):
        return False


def in_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """What has glibc (2.35 and later) ask for huge pages, in a process that is to start with `environ`: large blocks
    are mapped anew again and again, and the kernel clears each page at its first touch, of which there are 512 times
    as many in pages of 4 KiB. Nothing where the user has set this."""
    before = environ.get(_TUNABLES, "")
    return {} if _HUGE in before else {_TUNABLES: ":".join(filter(None, (before, f"{_HUGE}=1")))}


def ask_torch_for_huge_pages() -> None:
    """The same for torch's own tensors of 2 MB and more, in a process that has started without: it heeds this where it
    has made no tensor yet."""
    if _HUGE not in os.environ.get(_TUNABLES, ""):
        os.environ.setdefault(_TORCH_HUGE, "1")


def huge_pages() -> str:
    """Who is given huge pages on this machine: "always", "madvise" (who asks) or "never"; empty: not known."""
    try:
        return _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
