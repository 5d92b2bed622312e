"""How a rank ends when something went wrong: it reports first, then takes the whole job down. It never hangs.

What takes a job down depends on its launch:

    launch                    an exception left alone        so we
    plain mpirun, srun        the other ranks wait for ever  MPI_Abort(exit code)
    mpirun --with-ft ulfm     MPI_Abort and exit(n) hang     revoke the communicators, then SIGKILL ourselves:
                                                             the others' MPI calls fail and they end likewise
    srun -K0, MPICH           no rank is informed            a worker exits alone, and is evicted as silent;
                                                             where all must end: MPI_Abort

This holds for a plain console script; `python -m mpi4py`, which always calls MPI_Abort, would hang under
ULFM. If MPI itself hangs while ending, the kernel's alarm clock ends the process, and a signal is noticed
in every launch.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn, Protocol

from mpitrain.errors import EXIT_ERROR, AgreedError, EvictedError, LostRankError, UsageError
from mpitrain.mpi import json_messages
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.faults.agreement import agree, revoke
from mpitrain.mpi.faults.error_report import RankInfo, class_of, report
from mpitrain.mpi.faults.errors import is_lost_peer
from mpitrain.system import processes
from mpitrain.system.files.error_record import exit_code, is_interrupt
from mpitrain.system.launched import rank_status
from mpitrain.system.saying import flush, tell

_ALARM_S = 10
_REVOKE_WAIT_S = 1.0
_ABORT_WAIT_S = 30.0
_ending = threading.Lock()  # held for ever by the first thread that ends the job


class JobRank(RankInfo, Protocol):
    """A rank that can end its job: how much of a death the launch survives, and what there is to take down.

    `may_die_alone`, `survives_shrink`: whether the others continue without this rank, or without any rank; `evicted`:
    ranks that will never answer; `lost`: ranks that were left behind; `processes[r]`: the process of rank r.
    """

    rank: int
    comm: MPI.Intracomm
    fault_tolerance: str
    may_die_alone: bool
    survives_shrink: bool
    evicted: set[int]
    lost: set[int]
    processes: list[str]
    exit_code: int

    def all_communicators(self) -> Iterable[MPI.Comm]: ...

    def finish(self) -> None: ...


def install_hooks(rank: JobRank) -> None:
    """Make any uncaught exception, in any thread of this process, end the whole job."""
    main_before, thread_before, owner = sys.excepthook, threading.excepthook, os.getpid()

    def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interactive = rank.size == 1 and hasattr(sys, "ps1")
        if interactive or os.getpid() != owner:  # a forked child, such as a data loader's worker, is no rank
            main_before(kind, error, trace)
            return
        end_job(rank, error.with_traceback(trace))

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != owner or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            thread_before(args)
            return
        end_job(rank, args.exc_value)

    sys.excepthook = on_main
    threading.excepthook = on_thread


def end_job(rank: JobRank, error: BaseException) -> NoReturn:
    """Report rank, role, step and traceback, then end the whole job with the error's exit code."""
    if not _ending.acquire(blocking=False):
        while True:  # another thread of this process is at it and will end this one too
            time.sleep(1)
    code = exit_code(error)
    rank_status.reach(rank_status.ENDED, code)
    if isinstance(error, AgreedError):  # rank 0 has printed it; all ranks are here, so an orderly end works
        _set_alarm()
        rank.finish()
        flush(sys.stdout)
        os._exit(code)
    report(rank, error)
    _set_alarm()
    if not MPI.Is_initialized() or MPI.Is_finalized():
        os._exit(code)
    if MPI.COMM_WORLD.size == 1:
        MPI.Finalize()
        os._exit(code)
    alone = rank.may_die_alone and not (is_lost_peer(error) or _ends_all(error))
    if rank.fault_tolerance == "ulfm" and alone:
        os.kill(os.getpid(), signal.SIGKILL)  # MPI informs the servers, which go on without us
    if rank.fault_tolerance == "ulfm":
        _leave_ulfm(rank, error)
    if rank.fault_tolerance == "heartbeat" and _dies_alone(rank, error):
        os._exit(code)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _dies_alone(rank: JobRank, error: BaseException) -> bool:
    """Whether the servers will notice and go on without this rank."""
    return isinstance(error, EvictedError) or (
        rank.may_die_alone and rank.rank != 0 and not (isinstance(error, LostRankError) or _ends_all(error))
    )


def _ends_all(error: BaseException) -> bool:
    """Whether it is meant for the whole job, also where the others could go on without this rank."""
    return isinstance(error, UsageError) or is_interrupt(error) or bool(getattr(error, "ends_all", False))


def end_without_finalize(rank: JobRank) -> NoReturn:
    """The orderly end of a run that has lost ranks: rank 0 waits for the last message of every other rank, and ends
    the evicted ranks that are only stopped.

    `MPI_Finalize` is left out: after a failure it hangs one time in four, and a stopped rank would hold it for ever.
    """
    json_messages.await_farewells(rank.engine, rank.rank, rank.size, rank.evicted)
    for stream in (sys.stdout, sys.stderr):
        flush(stream)
    if rank.rank == 0 or rank.fault_tolerance == "heartbeat":
        for evicted in rank.evicted:  # stopped ones on this host; MPI has no other way to end them
            processes.send_signal(rank.processes[evicted], signal.SIGKILL)
    if rank.fault_tolerance == "heartbeat" and not _may_hold_launcher(rank):
        os._exit(rank.exit_code)
    if rank.rank == 0:
        if rank.fault_tolerance != "ulfm":
            _set_alarm()
            MPI.COMM_WORLD.Abort(rank.exit_code)
    elif rank.fault_tolerance != "ulfm":
        # a rank that left by itself, without Finalize, would make the launcher's exit code 1
        time.sleep(_ABORT_WAIT_S)
    os._exit(rank.exit_code)


def _may_hold_launcher(rank: JobRank) -> bool:
    """Whether an evicted rank may be stopped on a node on which no rank is left to end it."""
    place, ranks = processes.place, rank.processes
    seen = {place(process) for other, process in enumerate(ranks) if other not in rank.evicted}
    return any(place(ranks[other]) not in seen for other in rank.evicted)


def leave_start(comm: MPI.Comm, error: BaseException) -> NoReturn:
    """End this process after a rank has died (ULFM) while the ranks were being brought together."""
    rank_status.reach(rank_status.ENDED, EXIT_ERROR)
    message = f"another rank has died before all had met in MPI ({class_of(error)})"
    tell(f"mpitrain: rank {MPI.COMM_WORLD.rank}: {message}")
    _set_alarm()
    with contextlib.suppress(MPI.Exception):  # ranks that wait for us there get an error
        comm.Revoke()
        MPI.COMM_WORLD.Revoke()
    os._exit(EXIT_ERROR)


def _leave_ulfm(rank: JobRank, error: BaseException) -> NoReturn:
    """Inform the others through MPI while we can, then end in a way that is noticed.

    The rank where it went wrong dies by a signal, the one death that ULFM reports to every rank. A rank that
    only got the news exits with a code, so that mpirun's own exit code is not 0: it ignores ranks that died
    by a signal.
    """
    with contextlib.suppress(MPI.Exception, TimeoutError):
        # a communication thread that is busy gets a moment; our death is noticed all the same
        revoke(rank.engine, rank.all_communicators(), _REVOKE_WAIT_S)
        on_main = threading.current_thread() is threading.main_thread()
        if rank.survives_shrink and on_main and not is_lost_peer(error):
            # call the job off: the others would go on without us, and meet what we have met
            agree(rank.engine, rank.comm, 0)
    if is_lost_peer(error):
        os._exit(exit_code(error))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _set_alarm() -> None:
    """Let the kernel end us if MPI hangs in what follows."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_ALARM_S)
