"""Train: `mt.train(job, strategy)` from Python, `mpitrain train JOB` from the shell; the same run either way, over
MPI or (`--threads`) in one process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.errors import AgreedError
from mpitrain.job import Job, Overrides
from mpitrain.options import check_not_reading
from mpitrain.reporting.fom import SILENT
from mpitrain.strategies.base import Strategy
from mpitrain.system.interrupts import interruptible
from mpitrain.system.saying import flush
from mpitrain.system.tracebacks import shortened
from mpitrain.training.families import FAMILIES, run_named
from mpitrain.training.job_file import load_job
from mpitrain.training.trained.made_here import Result

__all__ = ["train", "train_command"]


def train(
    job: Job, strategy: Strategy | None = None, threads: int | None = None, **overrides: Any
) -> dict[str, Any]:
    """Train `job` on all ranks of the MPI world this process belongs to, or with replicas that are threads.

    Args:
        strategy: replaces the job's own.
        threads: so many replicas, each a thread of this process, without any MPI; servers come on top.
        overrides: fields of `Overrides`, as on the command line (`epochs=`, `batch_size=`, `lr=`, `seed=`,
            `run_dir=`, `steps=`, ...). With `quiet=True` nothing is printed but why a run has failed; the command's
            `--quiet` prints the figure of merit, which a caller from Python finds in the result.

    Returns:
        On every rank, what `result.json` holds, but of the rows by rank (`ranks`, `injected`) its own alone: all of
        them are on rank 0. `exit_code` is what the command line would end with.

    Raises:
        AgreedError: the input is wrong on some rank; rank 0 has reported which and why. Any other exception ends
            the whole job, and of a single rank it is raised, as in a notebook or a test: the process can train again.
    """
    check_not_reading("train")
    if strategy is not None:
        overrides["strategy"] = str(strategy)
    if overrides.get("quiet"):
        overrides["quiet"] = SILENT
    try:
        with interruptible():
            if threads is not None:
                from mpitrain.training.in_threads.run import train_in_threads

                return Result(train_in_threads(lambda: job, Overrides(**overrides), threads), job)
            return Result(_train(lambda: job, Overrides(**overrides)), job)
    except Exception as error:
        raise shortened(error)  # noqa: B904 - the same one


def train_command(
    path: str, overrides: Overrides, settings: Sequence[str] = (), threads: int | None = None
) -> int:
    """`mpitrain train`: the exit code of the run."""
    if threads is not None:
        from mpitrain.training.in_threads.run import threads_command

        return threads_command(lambda: load_job(path, settings), overrides, threads, path)
    from mpitrain.mpi.runtime import start
    from mpitrain.training import signals

    runtime = start()
    try:
        code = int(_train(lambda: load_job(path, settings), overrides, path)["exit_code"])
    except AgreedError as error:
        code = error.exit_code
    except BaseException as error:
        runtime.end_job(error)
    flush()
    runtime.exit_code = code
    runtime.finish()
    signals.ignore()
    gc.freeze()  # a walk through torch's million objects is most of a rank's exit, on cores that all ranks share
    return code


def train_and_go_on(path: str, overrides: Overrides, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A run of a job file in a process that goes on after it, as with `train`: what `result.json` holds.

    Raises:
        AgreedError: as `train`. Of a rank that is alone, any other exception too; of several ranks, it ends them all.
    """
    return _train(lambda: load_job(path, settings), overrides, path, goes_on=True)


def _train(
    make_job: Callable[[], Job], overrides: Overrides, job_file: str | None = None, goes_on: bool = False
) -> dict[str, Any]:
    """One run from start to finish; an exception other than an agreed one ends the whole job, of several ranks, and of
    a command that does nothing else (unless the process `goes_on`)."""
    from mpitrain.mpi.runtime import start
    from mpitrain.system import trace
    from mpitrain.training import signals
    from mpitrain.training.session import begin, prepare
    from mpitrain.training.watchdog.watchdog import Watchdog

    runtime, session = start(), None
    try:
        session = prepare(runtime, make_job, overrides, job_file)
        with Watchdog(runtime, session, overrides.watchdog_s):
            begin(runtime)
            return session.finish(run_named(session.strategy.choose(FAMILIES).processes, session))
    except AgreedError:
        raise
    except BaseException as error:
        if not (goes_on or job_file is None) or not runtime.is_alone:
            runtime.end_job(error)
        if session is not None:
            session.report.close()
        runtime.forget_run()
        raise
    finally:
        trace.finish()
        signals.uninstall()
        if session is not None:
            session.close()
