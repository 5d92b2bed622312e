"""What one rank reports about an error: a message on stderr and a record in the run directory.

Invariants: every line on stderr bears the rank; an error that many ranks meet at once (a mistake of the user's, a
death) is printed once for all of them; nothing that goes wrong while an error is reported keeps the job alive.
"""

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
from pathlib import Path
from typing import Protocol
from zlib import crc32

from mpitrain.errors import (
    CheckpointError,
    EvictedError,
    LostRankError,
    OutputError,
    UsageError,
    printable,
)
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.errors import CalledOffError, is_lost_peer
from mpitrain.system.files.error_record import is_interrupt, write_record
from mpitrain.system.files.folders import make_private
from mpitrain.system.launched import rank_status
from mpitrain.system.saying import flush
from mpitrain.system.tracebacks import frames

_DRAIN_S = 2.0
_ASK_S = 1.0
# Errors whose message says all there is to say.
_SELF_EXPLANATORY = (UsageError, LostRankError, EvictedError, CheckpointError, OutputError)


class RankInfo(Protocol):
    """Who a rank is and what it does, as far as an error report needs it. `launched[r]` is the rank at launch of what
    is rank r now, `hosts[r]` its host."""

    size: int
    role: str
    step: int
    run_dir: Path | None
    launched: list[int]
    hosts: list[str]
    engine: Engine

    @property
    def launched_rank(self) -> int: ...

    def where(self) -> str: ...

    def dead(self) -> set[int]: ...


def report(rank: RankInfo, error: BaseException) -> None:
    """Write the error to stderr, every line tagged with the rank, and to run_dir/errors/rank-N.json.

    The messages of a user's mistake and of the loss of a peer say everything, once for all ranks that meet it; every
    other error comes with its traceback, on stderr from the user's own function on, in the file as a whole.
    """
    summary = f"mpitrain: {rank.where()}: {type(error).__name__}: {error}"
    plain = isinstance(error, _SELF_EXPLANATORY) or is_lost_peer(error)
    shared = str(error) if isinstance(error, UsageError) else ""
    if is_lost_peer(error) and not isinstance(error, CalledOffError):
        shared = _who_has_died(rank)
        summary = f"mpitrain: {rank.where()}: {shared} ({class_of(error)})"
    if is_interrupt(error):
        summary, plain, shared = f"mpitrain: {rank.where()}: interrupted", True, ""
    if not shared or _is_first(rank, shared):
        _print(rank, summary if plain else frames(error) + summary)
    if rank.run_dir is not None:
        _write_record(rank, rank.run_dir, error)


def _write_record(rank: RankInfo, run_dir: Path, error: BaseException) -> None:
    try:
        write_record(rank, run_dir, error)
    except OSError as failure:  # a full disk must not keep the job alive
        _print(rank, f"mpitrain: could not write the error report: {failure}")


def _who_has_died(rank: RankInfo) -> str:
    """One sentence for people, as far as this rank knows."""
    dead: set[int] = set()

    def ask() -> None:
        dead.update(rank.dead())

    with contextlib.suppress(Exception):  # a communication thread that is busy, or broken
        rank.engine.wait(rank.engine.call(ask), timeout_s=_ASK_S)
        rank_status.know_dead([rank.launched[one] for one in sorted(dead)])
    names = [
        f"rank {rank.launched[one]}" + f" on host {rank.hosts[one]}" * bool(rank.hosts[one])
        for one in sorted(dead)
    ]
    if not names:
        return "another rank has died or has ended the job, and says why if it can"
    named = ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)
    return f"{named} {'has' if len(names) == 1 else 'have'} died, and this job does not go on without"


def class_of(error: BaseException) -> str:
    """MPI's error class, which users search for; torch keeps only the text of an error."""
    text = str(error)
    return next((name for name in ("MPI_ERR_PROC_FAILED", "MPI_ERR_REVOKED") if name in text), text)


def _is_first(rank: RankInfo, text: str) -> bool:
    """Whether no other rank has reported this: a mistake of the user's, or a death, which all ranks meet at once."""
    if rank.run_dir is None:
        return True
    try:
        folder = make_private(Path(rank.run_dir), "errors")
        (folder / f"reported-{crc32(text.encode()):08x}").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # a full disk must not keep the message back
        return True
    return True


def _print(rank: RankInfo, text: str) -> None:
    """Write to the process's stderr itself: torch.distributed gives hooks a sys.stderr that is lost when the process
    ends."""
    for stream in (sys.stdout, sys.stderr):
        flush(stream)
    data = "".join(f"[rank {rank.launched_rank}] {line}\n" for line in printable(text).splitlines()).encode(
        errors="replace"
    )
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
        _drain(2)


def _drain(fd: int) -> None:
    """Wait until the launcher has read what was written into its pipe: MPICH's drops the rest when the job is
    aborted."""
    deadline_s = time.monotonic() + _DRAIN_S
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        while int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.001)
