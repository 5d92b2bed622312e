"""One job at a time in a run directory: `RUN_DIR/lock` says which process of which host holds it, and
`RUN_DIR/launch-lock` which `mpitrain launch`.

Invariants: standard library only, and no lock of the file system, which parallel ones may lack: the file is made where
there is none (O_EXCL), holds host, process and Slurm job, and is touched every few seconds while its holder lives. A
lock that was left behind blocks nobody: on the same host the process is looked up, a later run of the same Slurm job
knows that the earlier one has ended, and elsewhere a file that is not touched for `QUIET_S` is nobody's. No two hosts'
clocks are compared. A holder whose lock was taken all the same learns of it, and ends its job.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import OutputError, UsageError
from mpitrain.system import background
from mpitrain.system.files.run_directory import read_bounded
from mpitrain.system.saying import tell

LOCK_FILE, LAUNCH_LOCK_FILE = "lock", "launch-lock"
REFRESH_S = 5.0
QUIET_S = 30.0  # so long a holder on another host may be slow
_LOOK_EVERY_S = 0.1
_MAX_BYTES = 10_000


class _Seen(NamedTuple):
    """A lock as it was found: its text, and when it was last touched by its own file system's clock."""

    text: bytes
    touched_ns: int


class RunLock:
    """The lock of one run directory for one start of a run.

    Args:
        run_dir: of the run; attempt: id of the start, which its other ranks know too.
        name: of the file; a launch has one of its own, from before its ranks start until it has ended.
    """

    def __init__(self, run_dir: Path, attempt: str, name: str = LOCK_FILE):
        self.path, self.attempt = run_dir / name, attempt
        self._over = threading.Event()
        self._turn = threading.Lock()  # what is given up is not made again
        self._removing: tuple[int, float] | None = (
            None  # another's guard of a removal, and since when it is unchanged
        )
        self._pid = os.getpid()

    def take(self) -> None:
        """Hold the lock from here on; waits for `QUIET_S` where it is not known whether its holder lives.

        Raises:
            UsageError: another job holds it; names its host and process.
        """
        first: _Seen | None = None
        began_s = time.monotonic()
        while not self._make():
            seen = self._look()
            if seen is None:
                continue
            holder = _read(seen.text)
            alive = False if holder.get("attempt") == self.attempt else _is_alive(holder)
            if alive or (first is not None and seen != first):
                self._refuse(holder)
            if first is None and alive is None:
                first, began_s = seen, time.monotonic()
                self._report_waiting(holder)
            if alive is False or time.monotonic() - began_s > QUIET_S:
                self._remove(seen)
                first = None
            else:
                time.sleep(_LOOK_EVERY_S)
        atexit.register(self.release)
        background.start("lock", self._refresh)

    def release(self) -> None:
        """Let others have it; may be called twice, and by a process that never held it."""
        self._over.set()
        atexit.unregister(self.release)
        if self._pid != os.getpid():  # a forked child holds nothing
            return
        with self._turn, contextlib.suppress(OSError):
            if self._is_ours():
                self.path.unlink()

    def _make(self) -> bool:
        """Whether there was no lock, and this process has made one."""
        text = json.dumps({"attempt": self.attempt, **_who_we_are()}).encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {error.strerror}; choose another run directory, or free space"
            ) from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise UsageError(
                f"cannot write {self.path}: {error.strerror}; choose another run directory, or free space"
            ) from error
        return True

    def _look(self) -> _Seen | None:
        if self.path.is_symlink():  # which O_EXCL does not follow
            raise UsageError(f"{self.path} is a link: remove it, or choose another run directory")
        try:
            touched_ns = self.path.stat().st_mtime_ns
            return _Seen(read_bounded(self.path, _MAX_BYTES), touched_ns)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.path} cannot be read: {error}; remove it, or choose another run directory"
            ) from error

    def _remove(self, seen: _Seen) -> None:
        """Take away the lock of a job that has ended, and no other: one at a time looks once more and removes it."""
        removing = self.path.with_name(f".{self.path.name}.removing")
        try:
            os.close(os.open(removing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                made_ns = removing.stat().st_mtime_ns
                if self._removing is None or self._removing[0] != made_ns:
                    self._removing = made_ns, time.monotonic()
                if time.monotonic() - self._removing[1] > QUIET_S:  # left by one that was killed at it
                    removing.unlink()
            time.sleep(_LOOK_EVERY_S)
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if self.path.read_bytes() == seen.text:
                    self.path.unlink()
        finally:
            removing.unlink(missing_ok=True)

    def _report_waiting(self, holder: dict[str, Any]) -> None:
        waits = f"waiting to see whether it lives, up to {QUIET_S:g} s"
        message = f"mpitrain: {self.path} is held by {_name(holder)}: {waits}"
        tell(message)

    def _refuse(self, holder: dict[str, Any]) -> None:
        raise UsageError(
            f"{self.path.parent} is in use by {_name(holder)}: choose another run directory, or end that job; if it "
            f"is certain to be gone, remove {self.path}"
        )

    def _is_ours(self) -> bool:
        return _read(self.path.read_bytes()).get("attempt") == self.attempt

    def _refresh(self) -> None:
        """In a thread of its own, while the run lasts.

        Raises:
            OutputError: somebody else has taken the lock; the job must not write on.
        """
        while not self._over.wait(REFRESH_S):
            try:
                if self._is_ours():
                    os.utime(self.path)
                    continue
                text = self.path.read_bytes()
            except FileNotFoundError:
                with self._turn, contextlib.suppress(UsageError):
                    if not self._over.is_set():
                        self._make()
                continue
            except OSError:
                continue  # the file system is away; the next look decides
            if not self._over.is_set():
                raise OutputError(
                    f"{self.path.parent} was taken over by {_name(_read(text))} while this job held it; this job ends"
                )


def holder_lives(run_dir: Path, ours: Path | None = None, name: str = LOCK_FILE) -> bool | None:
    """Whether the process that holds the lock of `run_dir` is still there; None where it was touched lately on a host
    from which that cannot be known.

    Args:
        ours: a directory on the same file system whose lock this process holds: what was not touched for `QUIET_S`
            before that is nobody's.
        name: of the lock.
    """
    path = run_dir / name
    try:
        holder, touched_s = _read(read_bounded(path, _MAX_BYTES)), path.stat().st_mtime
    except (OSError, ValueError):
        return False
    alive = _is_alive(holder)
    if alive is not None:
        return alive
    try:
        quiet = ours is not None and touched_s < (ours / LOCK_FILE).stat().st_mtime - QUIET_S
    except OSError:
        return None
    return False if quiet else None


def _who_we_are() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether the process that made a lock still runs; None where that cannot be known from here."""
    ours = _who_we_are()
    if (
        ours["job"]
        and holder.get("job") == ours["job"]
        and _number(holder.get("restart")) < _number(ours["restart"])
    ):
        return False
    if not ours["boot"] or any(holder.get(key) != ours[key] for key in ("host", "boot", "namespace")):
        return None
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return None
    if pid == ours["pid"] and holder.get("began") == ours["began"]:
        return False  # a run of this very process, which has ended without a word
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    began = _began(pid)
    return not began or began == holder.get("began")


def _number(text: Any) -> int:
    return int(text) if str(text).isdecimal() and len(str(text)) < 10 else 0


def _began(pid: int) -> str:
    """When a process was started, in the kernel's own count; "ended" if it is only waited for, "" if not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]


def _namespace() -> str:
    """Within which process numbers mean the same."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _read(text: bytes) -> dict[str, Any]:
    """A lock's content; empty where it is no lock of ours, or is only being written."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(holder: dict[str, Any]) -> str:
    """For people; what stands in the file may be anything."""

    def field(key: str) -> str:
        return ascii(str(holder.get(key, "?")))[1:-1][:80]

    job = f" (Slurm job {field('job')})" if holder.get("job") else ""
    return f"process {field('pid')} on host {field('host')}{job}, since {field('since')}"
