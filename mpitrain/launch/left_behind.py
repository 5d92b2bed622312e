"""What killed launches leave on this host, and is removed once nobody uses it.

    /dev/shm/mpich_shm_*, /dev/shm/sm_segment.*    memory that the ranks of a node share, of MPICH and Open MPI
    $TMPDIR/hydra_hwloc_xmlfile_*                  the machine as MPICH's mpiexec describes it to its ranks

Invariants: only files of our own user. Memory is used by whoever has it open or mapped, and its maker has it from the
moment it is there, so a file that was listed before processes are looked at and that none of them has is nobody's. The
other file is used by a launcher that began shortly before it was made. A process that cannot be looked at uses nothing
of ours. What cannot be removed stays. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"
_SHARED = re.compile(r"(mpich_shm_|sm_segment\.).+")
_HYDRA = re.compile(r"hydra_hwloc_xmlfile_\w+")
_HYDRA_NAMES = ("mpiexec", "mpirun", "hydra_pmi_proxy")
_MAKES_WITHIN_S = 60.0  # from the start of a launcher to its file, on a busy machine


def remove_left_behind() -> list[Path]:
    """Remove it; what was removed."""
    shared = _listed({Path("/dev/shm"), Path(os.environ.get(_SEGMENTS, "/dev/shm"))}, _SHARED)
    described = _listed({Path("/tmp"), Path(tempfile.gettempdir())}, _HYDRA)
    used = _used(shared) if shared else set()
    nobodys = [path for path, number in shared.items() if number not in used]
    if described:
        began_s = list(_launchers_began_s())
        for path in described:
            with contextlib.suppress(OSError):
                made_s = path.stat().st_mtime
                if not any(-1.0 <= made_s - one_s <= _MAKES_WITHIN_S for one_s in began_s):
                    nobodys.append(path)
    removed = []
    for path in nobodys:
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def _listed(folders: set[Path], names: re.Pattern[str]) -> dict[Path, tuple[int, int]]:
    """Our own plain files with such names: (device, inode)."""
    found = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid():
                        found[Path(entry.path)] = status.st_dev, status.st_ino
    return found


def _used(shared: dict[Path, tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of these some process has open or mapped. A process opens a file before it maps it, so that is asked
    first."""
    paths, used = {str(path): number for path, number in shared.items()}, set()
    for process in _processes():
        with contextlib.suppress(OSError):
            for entry in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    if (number := paths.get(os.readlink(entry.path))) is not None:
                        used.add(number)
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and words[5] in paths:
                    used.add(paths[words[5]])
    return used


def _processes() -> Iterator[Path]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield Path(entry.path)


def _launchers_began_s() -> Iterator[float]:
    """When the launchers that run here began, by the clock that files are dated with."""
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for process in _processes():
        with contextlib.suppress(OSError, IndexError, ValueError):
            name, rest = (process / "stat").read_text().rsplit(")", 1)
            if name.split("(", 1)[1].startswith(_HYDRA_NAMES):
                yield booted_s + int(rest.split()[19]) / os.sysconf("SC_CLK_TCK")
