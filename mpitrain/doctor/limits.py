"""The limits under which processes of this node run: memory of the control group, locked memory, open files, shared
memory, and the quota of the shared file system.

Invariants: a limit that cannot be found out is none. Every path and command is looked up when it is asked.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mpitrain.doctor.checks import Unfit, Wanted
from mpitrain.system.memory import left_in_groups

SHM = Path("/dev/shm")
RDMA = Path("/sys/class/infiniband")
_LEAST_LOCKED_BYTES = 2**30  # RDMA registers what it sends and receives, and 64 KiB is a common default


def check_memory(wanted: Wanted) -> str:
    """Memory that can still be had: of the machine, and of the control groups around this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024.0
    group = min(left_in_groups(), default=machine)
    gib, cause = min((machine / 2**30, ""), (group / 2**30, " within the job's control group"))
    if gib < wanted.min_memory_gib:
        raise Unfit(f"{gib:.1f} GiB of memory available{cause}, {wanted.min_memory_gib:g} wanted")
    return f"{gib:.1f} GiB of memory available{cause}"


def check_limits(wanted: Wanted) -> str:
    """Open files, locked memory where there is RDMA, and /dev/shm."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux knows no unlimited number of them
    if files < wanted.min_open_files:
        raise Unfit(f"{files} files may be open at a time, {wanted.min_open_files} wanted: ulimit -n")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = RDMA.is_dir() and any(RDMA.iterdir())
    if has_rdma and locked != resource.RLIM_INFINITY and locked < _LEAST_LOCKED_BYTES:
        raise Unfit(
            f"{locked // 1024} KiB of memory may be locked, and RDMA ({', '.join(sorted(os.listdir(RDMA)))}) needs it "
            "unlimited: ulimit -l; under Slurm PropagateResourceLimitsExcept=MEMLOCK"
        )
    system = os.statvfs(SHM)
    shm = system.f_bavail * system.f_frsize / 2**30
    if shm < wanted.min_shm_gib:
        raise Unfit(f"{shm:.2f} GiB free in {SHM}, {wanted.min_shm_gib:g} wanted: ranks of a node talk there")
    memory = "any" if locked == resource.RLIM_INFINITY else f"{locked // 1024} KiB of"
    return f"{files} open files, {memory} memory may be locked, {shm:.1f} GiB free in {SHM}"


def check_quota(wanted: Wanted) -> str:
    """The quota on the shared file system, as far as `lfs quota` (Lustre) or `quota` tells it."""
    folder = os.path.realpath(wanted.shared)
    if shutil.which("lfs") and (text := _output("lfs", "quota", "-q", "-u", str(os.getuid()), folder)):
        found = list(parse_lfs_quota(text))
    elif shutil.which("quota") and (text := _output("quota", "-u", "-w", "-p")):
        found = [(f"{place}: {what}", used, limit) for place, what, used, limit in parse_quota(text)]
    else:
        return "no command here tells one"
    full = [f"{what}: {used} of {limit} used" for what, used, limit in found if limit and used >= limit]
    if full:
        raise Unfit(f"quota reached ({'; '.join(full)}): free space, or ask for more")
    most = max((used / limit for _, used, limit in found if limit), default=None)
    return "none set" if most is None else f"{most:.0%} of it used"


def _output(*command: str) -> str:
    """What it prints; empty where it fails. `quota` exits with 1 where one is exceeded."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_lfs_quota(text: str) -> Iterator[tuple[str, int, int]]:
    """(what, used, hard limit) of `lfs quota -q`: a line with file system, KiB used, soft and hard limit and grace
    time, and files in the same way; a `*` marks what is exceeded, a limit of 0 is none."""
    words = text.replace("*", "").split()
    if len(words) >= 9 and all(words[i].isdigit() for i in (1, 3, 5, 7)):
        yield "KiB", int(words[1]), int(words[3])
        yield "files", int(words[5]), int(words[7])


def parse_quota(text: str) -> Iterator[tuple[str, str, int, int]]:
    """(file system, what, used, hard limit) of `quota -w -p`: one line a file system, the same columns, the grace time
    as a number."""
    for line in text.splitlines():
        words = line.replace("*", "").split()
        if len(words) == 9 and all(word.isdigit() for word in words[1:]):
            yield words[0], "KiB", int(words[1]), int(words[3])
            yield words[0], "files", int(words[5]), int(words[7])
