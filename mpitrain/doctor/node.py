"""What one node can find out about itself, without MPI: a node that hangs here holds up no other.

Invariants: every check runs in a thread with a deadline, because a sick file system does not answer at all, and
returns text on success or raises `Unfit`. The report is one JSON file a node; `collect` reads them, and a node that
has not written one is unfit.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpitrain.system.atomic import write_whole

DEADLINE_S = 30.0
MAX_SKEW_S = 5.0


class Unfit(Exception):
    """A check failed; the message says what was seen."""


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Wanted:
    """What a fit node has.

    Attributes:
        gpus: how many devices; `None`: as many as Slurm has given this node, 0 outside it.
        devices: pattern of the device files; empty: ask CUDA. Variables are expanded on the node.
        disk: directory for large files, the node's own; variables are expanded on the node.
        shared: directory on the shared file system.
        data: an HDF5 file to read from; empty: one that is written first.
    """

    gpus: int | None = None
    devices: str = ""
    disk: str = "$TMPDIR"
    shared: str = "."
    data: str = ""
    min_memory_gib: float = 1.0
    min_free_gib: float = 1.0


def examine(wanted: Wanted, deadline_s: float = DEADLINE_S) -> list[Check]:
    """All checks, in the order in which they are cheap."""
    checks: dict[str, Callable[[Wanted], str]] = {
        "memory": check_memory,
        "disk": check_disk,
        "locking": check_locking,
        "clock": check_clock,
        "hdf5": check_hdf5,
        "devices": check_devices,
    }
    return [_within(deadline_s, name, check, wanted) for name, check in checks.items()]


def _within(deadline_s: float, name: str, check: Callable[[Wanted], str], wanted: Wanted) -> Check:
    outcome = Check(name, False, f"no answer within {deadline_s:g} s")

    def ask() -> None:
        nonlocal outcome
        try:
            outcome = Check(name, True, check(wanted))
        except Exception as error:  # whatever it is, the node is unfit and the next check is still asked
            detail = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
            outcome = Check(name, False, detail)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return outcome


def check_memory(wanted: Wanted) -> str:
    """Memory that can still be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20
    if available < wanted.min_memory_gib:
        raise Unfit(f"{available:.1f} GiB of memory available, {wanted.min_memory_gib:g} wanted")
    return f"{available:.1f} GiB of memory available"


def _directory(text: str) -> str:
    expanded = os.path.expandvars(text)
    return tempfile.gettempdir() if "$" in expanded or not expanded else expanded


def check_disk(wanted: Wanted) -> str:
    """Free space, and that what is written there comes back."""
    folder = _directory(wanted.disk)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize / 2**30
    if free < wanted.min_free_gib:
        raise Unfit(f"{free:.2f} GiB free in {folder}, {wanted.min_free_gib:g} wanted")
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
        file.write(b"now")
        file.flush()
        os.fsync(file.fileno())
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
    with tempfile.TemporaryDirectory(dir=_directory(wanted.disk), prefix="mpitrain-doctor-") as folder:
        path = Path(folder, "check.h5")
        written = np.arange(4096)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=written, chunks=(512,), fletcher32=True)
        with h5py.File(path, "r") as file:
            if not np.array_equal(file["x"][:], written):
                raise Unfit(f"h5py reads other numbers than it wrote in {folder}")
    return f"h5py {h5py.__version__} reads what it wrote"


def check_devices(wanted: Wanted) -> str:
    """As many devices as there should be, each of which computes."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    expected = wanted.gpus if wanted.gpus is not None else int(given) if given.isdigit() else 0
    if wanted.devices:
        pattern = os.path.expandvars(wanted.devices)
        found = len(glob.glob(pattern))
        if found < expected:
            raise Unfit(f"{found} of {expected} device(s) match {pattern}")
        return f"{found} device(s)"
    if not expected:
        return "no devices asked for"
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < expected:
        raise Unfit(f"CUDA sees {found} of {expected} device(s)")
    for index in range(found):
        ones = torch.ones(1 << 20, device=f"cuda:{index}")
        if float(ones.sum()) != 1 << 20:
            raise Unfit(f"device {index} cannot add ones")
    return f"{found} device(s) compute"


# ---- reports


def write_report(folder: Path, name: str, checks: list[Check]) -> None:
    """Write this node's report; a reader sees all of it or none."""
    text = json.dumps({"node": name, "checks": [check._asdict() for check in checks]})
    write_whole(folder / f"{name}.json", text)


def collect(folder: Path, hosts: list[str]) -> dict[str, list[str]]:
    """What is wrong with each unfit node, by name; a node without a readable report is unfit."""
    wrong: dict[str, list[str]] = {}
    for host in hosts:
        faults = ["did not report"]
        with contextlib.suppress(OSError, ValueError, KeyError):
            checks = json.loads((folder / f"{host}.json").read_text())["checks"]
            faults = [f"{check['name']}: {check['detail']}" for check in checks if not check["ok"]]
        if faults:
            wrong[host] = faults
    return wrong
