"""How a rank ends when something went wrong: report first, then take the whole job down. Never a hang.

What takes a job down depends on its launch:

    launch                    an exception left alone        so we
    plain mpirun, srun        the other ranks wait for ever  MPI_Abort(exit code)
    mpirun --with-ft ulfm     MPI_Abort and exit(n) hang     revoke the communicators, then SIGKILL ourselves:
                                                             the others' MPI calls fail and they end likewise
    srun -K0, MPICH           nobody is told                 a worker exits alone, and is given up as silent;
                                                             where all must end: MPI_Abort

This holds for a plain console script; `python -m mpi4py`, which always calls MPI_Abort, would hang under
ULFM. If MPI itself hangs while ending, the kernel's alarm clock ends the process, and a signal is noticed
in every launch.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn
from zlib import crc32

from mpitrain.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    AgreedError,
    CheckpointError,
    GivenUpError,
    LostRankError,
    MpitrainError,
    OutputError,
    UsageError,
    printable,
)
from mpitrain.mpi import json_messages
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.faults.agreement import agree, revoke
from mpitrain.mpi.faults.errors import CalledOffError, is_lost_peer
from mpitrain.system import processes, rank_status
from mpitrain.system.folders import make_private
from mpitrain.system.tracebacks import own_part

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

_ALARM_S = 10
_REVOKE_WAIT_S = 1.0
_DRAIN_S = 2.0
_ABORT_WAIT_S = 30.0
# Errors whose message says all there is to say.
_TOLD_WHOLE = (UsageError, LostRankError, GivenUpError, CheckpointError, OutputError)
_ending = threading.Lock()  # held for ever by the first thread that ends the job


def install_hooks(runtime: "Runtime") -> None:
    """Make any uncaught exception, in any thread of this process, end the whole job."""
    main_before, thread_before, owner = sys.excepthook, threading.excepthook, os.getpid()

    def on_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interactive = runtime.size == 1 and hasattr(sys, "ps1")
        if interactive or os.getpid() != owner:  # a forked child, such as a data loader's worker, is no rank
            main_before(kind, error, trace)
            return
        end_job(runtime, error.with_traceback(trace))

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != owner or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            thread_before(args)
            return
        end_job(runtime, args.exc_value)

    sys.excepthook = on_main
    threading.excepthook = on_thread


def exit_code(error: BaseException) -> int:
    """What the process ends with: the error's own code if it is ours, 130 after an interrupt, 1 otherwise."""
    if is_interrupt(error):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, MpitrainError) else EXIT_ERROR


def is_interrupt(error: BaseException) -> bool:
    """True if this rank got SIGINT: what is in C++ at that moment, such as torch's backward pass, raises another error,
    which keeps the interrupt's name or has it as its context."""
    seen: list[BaseException] = []
    told: BaseException | None = error
    while told is not None and told not in seen:
        if isinstance(told, KeyboardInterrupt) or "KeyboardInterrupt" in str(told):
            return True
        seen.append(told)
        told = told.__cause__ or told.__context__
    return False


def end_job(runtime: "Runtime", error: BaseException) -> NoReturn:
    """Report rank, role, step and traceback, then end the whole job with the error's exit code."""
    if not _ending.acquire(blocking=False):
        while True:  # another thread of this process is at it and will take us along
            time.sleep(1)
    code = exit_code(error)
    rank_status.reach(rank_status.ENDED, code)
    if isinstance(error, AgreedError):  # rank 0 has told; all ranks are here, so an orderly end works
        _set_alarm()
        runtime.finish()
        sys.stdout.flush()
        os._exit(code)
    report(runtime, error)
    _set_alarm()
    if not MPI.Is_initialized() or MPI.Is_finalized():
        os._exit(code)
    if runtime.size == 1 and not runtime.lost:
        MPI.Finalize()
        os._exit(code)
    alone = runtime.expendable and not (is_lost_peer(error) or _ends_all(error))
    if runtime.fault_tolerance == "ulfm" and alone:
        os.kill(os.getpid(), signal.SIGKILL)  # the servers are told, and go on without us
    if runtime.fault_tolerance == "ulfm":
        _leave_ulfm(runtime, error)
    if runtime.fault_tolerance == "heartbeat" and _dies_alone(runtime, error):
        os._exit(code)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _dies_alone(runtime: "Runtime", error: BaseException) -> bool:
    """Whether the servers will notice and go on without this rank."""
    return isinstance(error, GivenUpError) or (
        runtime.expendable
        and runtime.rank != 0
        and not (isinstance(error, LostRankError) or _ends_all(error))
    )


def _ends_all(error: BaseException) -> bool:
    """Whether it is meant for the whole job, also where the others could go on without this rank."""
    return isinstance(error, UsageError) or is_interrupt(error) or bool(getattr(error, "ends_all", False))


def end_without_some(runtime: "Runtime") -> NoReturn:
    """The orderly end of a run that has lost ranks: the others say bye to rank 0, which takes along what only sleeps.

    `MPI_Finalize` is left out: after a failure it hangs one time in four, and a stopped rank would hold it for ever.
    """
    json_messages.say_bye(runtime.engine, runtime.rank, runtime.size, runtime.given_up)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if runtime.rank == 0 or runtime.fault_tolerance == "heartbeat":
        for rank in runtime.given_up:  # stopped ones on this host; MPI has no other way to end them
            processes.send_signal(runtime.processes[rank], signal.SIGKILL)
    if runtime.fault_tolerance == "heartbeat" and not _may_hold_launcher(runtime):
        os._exit(runtime.exit_code)
    if runtime.rank == 0:
        if runtime.fault_tolerance != "ulfm":
            _set_alarm()
            MPI.COMM_WORLD.Abort(runtime.exit_code)
    elif runtime.fault_tolerance != "ulfm":
        # whoever left by itself, without Finalize, would make the launcher's exit code 1
        time.sleep(_ABORT_WAIT_S)
    os._exit(runtime.exit_code)


def _may_hold_launcher(runtime: "Runtime") -> bool:
    """Whether a rank that was given up may be stopped on a node where nobody is left to end it."""
    place, ranks = processes.place, runtime.processes
    seen = {place(process) for rank, process in enumerate(ranks) if rank not in runtime.given_up}
    return any(place(ranks[rank]) not in seen for rank in runtime.given_up)


def report(runtime: "Runtime", error: BaseException) -> None:
    """Write the error to stderr, every line tagged with the rank, and to run_dir/errors/rank-N.json.

    A user's mistake and the loss of a peer tell all in their message, once for all ranks that meet it; everything else
    comes with its traceback, on stderr from the user's own function on, in the file whole.
    """
    trace = "".join(traceback.format_exception(error))
    summary = f"mpitrain: {runtime.where()}: {type(error).__name__}: {error}"
    plain = isinstance(error, _TOLD_WHOLE) or is_lost_peer(error)
    shared = str(error) if isinstance(error, UsageError) else ""
    if is_lost_peer(error) and not isinstance(error, CalledOffError):
        shared = _who_has_died(runtime)
        summary = f"mpitrain: {runtime.where()}: {shared} ({_class_of(error)})"
    if is_interrupt(error):
        summary, plain, shared = f"mpitrain: {runtime.where()}: interrupted", True, ""
    if not shared or _is_first(runtime, shared):
        _tell(runtime, summary if plain else own_part(error) + summary)
    if runtime.run_dir is None:
        return
    record = {
        "rank": runtime.launched_rank,
        "role": runtime.role,
        "step": runtime.step,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": exit_code(error),
        "traceback": trace,
    }
    try:
        folder = make_private(Path(runtime.run_dir), "errors")
        (folder / f"rank-{runtime.launched_rank}.json").write_text(json.dumps(record, indent=1) + "\n")
    except OSError as failure:  # a full disk must not keep the job alive
        _tell(runtime, f"mpitrain: could not write the error report: {failure}")


def _who_has_died(runtime: "Runtime") -> str:
    """One sentence for people, as far as this rank knows."""
    dead: set[int] = set()

    def look() -> None:
        dead.update(runtime.dead())

    with contextlib.suppress(Exception):  # a communication thread that is busy, or broken
        runtime.engine.wait(runtime.engine.call(look), timeout_s=_REVOKE_WAIT_S)
    hosts = getattr(runtime, "hosts", [""] * runtime.size)  # not known yet while all are brought together
    names = [
        f"rank {runtime.launched[rank]}" + f" on host {hosts[rank]}" * bool(hosts[rank])
        for rank in sorted(dead)
    ]
    if not names:
        return "another rank has died or has ended the job, and says why if it can"
    named = ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)
    return f"{named} {'has' if len(names) == 1 else 'have'} died, and this job does not go on without"


def _class_of(error: BaseException) -> str:
    """What to search for; torch keeps the text alone."""
    text = str(error)
    return next((name for name in ("MPI_ERR_PROC_FAILED", "MPI_ERR_REVOKED") if name in text), text)


def leave_start(comm: "MPI.Comm", error: BaseException) -> NoReturn:
    """A rank has died (ULFM) while all were being brought together, before there is a runtime."""
    rank_status.reach(rank_status.ENDED, EXIT_ERROR)
    told = f"another rank has died before all had met in MPI ({_class_of(error)})"
    print(f"mpitrain: rank {MPI.COMM_WORLD.rank}: {told}", file=sys.stderr, flush=True)
    _set_alarm()
    with contextlib.suppress(MPI.Exception):  # who waits for us there hears of it
        comm.Revoke()
        MPI.COMM_WORLD.Revoke()
    os._exit(EXIT_ERROR)


def forget_reports(run_dir: Path) -> None:
    """A new start: what the one before has reported is no news any more, should it be met again."""
    for path in (run_dir / "errors").glob("reported-*"):
        path.unlink(missing_ok=True)


def _is_first(runtime: "Runtime", text: str) -> bool:
    """Whether no other rank has reported this: a mistake of the user's, or a death, which all ranks meet at once."""
    if runtime.run_dir is None:
        return True
    try:
        folder = make_private(Path(runtime.run_dir), "errors")
        (folder / f"reported-{crc32(text.encode()):08x}").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # a full disk must not keep the message back
        return True
    return True


def _tell(runtime: "Runtime", text: str) -> None:
    """To the process's stderr itself: torch.distributed lends hooks a sys.stderr that is lost when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the pipe's reader is gone, or the stream is closed
            stream.flush()
    data = "".join(
        f"[rank {runtime.launched_rank}] {line}\n" for line in printable(text).splitlines()
    ).encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
        _drain(2)


def _drain(fd: int) -> None:
    """Wait until the launcher has read what we wrote into its pipe: MPICH's drops the rest when the job is aborted."""
    deadline_s = time.monotonic() + _DRAIN_S
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        while int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder) > 0:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.001)


def _leave_ulfm(runtime: "Runtime", error: BaseException) -> NoReturn:
    """Tell the others through MPI while we can, then end in a way that is noticed.

    The rank where it went wrong dies by a signal, the one death that ULFM reports to everybody. A rank that
    only heard of it exits with a code, so that mpirun's own exit code is not 0: it ignores ranks that died
    by a signal.
    """
    with contextlib.suppress(MPI.Exception, TimeoutError):
        # a communication thread that is busy gets a moment; our death is noticed all the same
        revoke(runtime, _REVOKE_WAIT_S)
        on_main = threading.current_thread() is threading.main_thread()
        if runtime.recovers and on_main and not is_lost_peer(error):
            # call the job off: the others would go on without us, and meet what we have met
            agree(runtime, 0)
    if is_lost_peer(error):
        os._exit(exit_code(error))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _set_alarm() -> None:
    """Let the kernel end us if MPI hangs in what follows."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_ALARM_S)
