"""What one node can find out about itself, without MPI: a node that hangs here holds up no other.

Invariants: every check runs in a thread with a deadline, because a sick file system does not answer at all. Large
imports come first and have a deadline of their own: where a thousand nodes import torch at once that takes minutes,
and no check that needs it is slow because of it.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import tempfile
import time
from pathlib import Path

from mpitrain.doctor.checks import Asked, Check, Seen, Unfit, Wanted, directory
from mpitrain.doctor.cores import check_cores
from mpitrain.doctor.gpus import check_devices, check_gpu_health
from mpitrain.doctor.limits import check_limits, check_memory, check_quota
from mpitrain.doctor.speed import check_speed
from mpitrain.system import background

DEADLINE_S = 30.0
IMPORTS_DEADLINE_S = 240.0  # below the five minutes that a template gives the whole step
MAX_SKEW_S = 5.0


def examine(
    wanted: Wanted, deadline_s: float = DEADLINE_S, imports_deadline_s: float = IMPORTS_DEADLINE_S
) -> list[Check]:
    """All checks, in the order in which they are cheap; those that need an import that failed are left out."""
    plain: dict[str, Asked] = {
        "memory": check_memory,
        "limits": check_limits,
        "cores": check_cores,
        "disk": check_disk,
        "quota": check_quota,
        "locking": check_locking,
        "clock": check_clock,
        "gpu health": check_gpu_health,
    }
    heavy: dict[str, Asked] = {"hdf5": check_hdf5, "devices": check_devices}
    if wanted.speed_s:
        heavy["speed"] = check_speed
    found = [_within(deadline_s, name, check, wanted) for name, check in plain.items()]
    found.append(_within(imports_deadline_s, "imports", import_all, wanted))
    if found[-1].ok:
        found += [_within(deadline_s, name, check, wanted) for name, check in heavy.items()]
    return found


def _within(deadline_s: float, name: str, check: Asked, wanted: Wanted) -> Check:
    outcome = Check(name, False, f"no answer within {deadline_s:g} s")

    def ask() -> None:
        nonlocal outcome
        try:
            seen = check(wanted)
            outcome = Check(name, True, *(seen if isinstance(seen, Seen) else (seen,)))
        except Exception as error:  # whatever it is, the node is unfit and the next check is still asked
            detail = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
            outcome = Check(name, False, detail)

    background.start(f"check-{name}", ask).join(deadline_s)
    return outcome


def import_all(wanted: Wanted) -> str:
    """Import what the other checks need."""
    needs_torch = wanted.speed_s or (wanted.num_gpus and not wanted.devices)
    names = ["h5py", *(["torch"] if needs_torch else [])]
    began_s = time.perf_counter()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Unfit(f"cannot import {name} ({error}): see to the environment in the site file") from None
    return f"{' and '.join(names)} in {time.perf_counter() - began_s:.1f} s"


def check_disk(wanted: Wanted) -> str:
    """Free space and inodes, and that what is written there comes back."""
    folder = directory(wanted.disk)
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize / 2**30
    if free < wanted.min_free_gib:
        raise Unfit(f"{free:.2f} GiB free in {folder}, {wanted.min_free_gib:g} wanted")
    for place in (folder, wanted.shared):
        _check_inodes(place, wanted.min_free_inodes)
    data = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="mpitrain-doctor-") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
        file.seek(0)
        if file.read() != data:
            raise Unfit(f"{folder} gives back other bytes than were written")
    return f"{free:.1f} GiB free in {folder}"


def _check_inodes(folder: str, wanted: int) -> None:
    system = os.statvfs(folder)
    # Some file systems have no fixed number of them and say 0 of 0.
    if system.f_files and system.f_favail < wanted:
        raise Unfit(f"{system.f_favail} more files can be made in {folder}, {wanted} wanted (inodes)")


def check_locking(wanted: Wanted) -> str:
    """HDF5 locks the files it opens unless it is configured not to."""
    with tempfile.NamedTemporaryFile(dir=wanted.shared, prefix="mpitrain-doctor-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() == "FALSE":
                return "no file locks, and HDF5_USE_FILE_LOCKING=FALSE asks for none"
            raise Unfit(
                f"no file locks in {wanted.shared} ({error}): set HDF5_USE_FILE_LOCKING=FALSE"
            ) from None
    return "files can be locked"


def check_clock(wanted: Wanted) -> str:
    """This node's clock against the file server's, which stamps the file."""
    with tempfile.NamedTemporaryFile(dir=wanted.shared, prefix="mpitrain-doctor-") as file:
        try:
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno == errno.EDQUOT:
                raise Unfit(f"your quota in {wanted.shared} is used up: free space there") from None
            raise
        skew_s = time.time() - os.stat(file.name).st_mtime
    if abs(skew_s) > MAX_SKEW_S:
        raise Unfit(f"the clock is {skew_s:+.1f} s off the file server's")
    return f"{skew_s:+.2f} s off the file server's clock"


def check_hdf5(wanted: Wanted) -> str:
    """A checked read through h5py."""
    import h5py
    import numpy as np

    if wanted.data:
        with h5py.File(wanted.data, "r") as file:
            name, array = next((name, item) for name, item in file.items() if isinstance(item, h5py.Dataset))
            return f"read {np.asarray(array[:1]).nbytes} bytes of {name} in {wanted.data}"
    with tempfile.TemporaryDirectory(dir=directory(wanted.disk), prefix="mpitrain-doctor-") as folder:
        path = Path(folder, "check.h5")
        written = np.arange(4096)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=written, chunks=(512,), fletcher32=True)
        with h5py.File(path, "r") as file:
            if not np.array_equal(file["x"][:], written):
                raise Unfit(f"h5py reads other numbers than it wrote in {folder}")
    return f"h5py {h5py.__version__} reads what it wrote"
