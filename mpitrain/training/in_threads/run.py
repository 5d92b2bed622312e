"""A run whose ranks are threads of this process: `mpitrain train JOB --threads N`, `mt.train(job, threads=N)`.

Invariants: every thread runs what a rank runs over MPI, and is given threads in place of processes. This thread, which
is the main one as a rule, starts them, hears signals and waits. The first failure ends all of them, is reported once,
with its rank, and is what is raised. Torch's own threads are divided among the replicas, and are as before afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain import torch_versions
from mpitrain.errors import AgreedError, MpitrainError, UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.job.asked import check
from mpitrain.mpi.allreduce_plan import Plan
from mpitrain.strategies.features import THREADS
from mpitrain.system import background
from mpitrain.system.files.error_record import exit_code, write_record
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.launch_variables import launched_task, node_name
from mpitrain.system.saying import flush, tell
from mpitrain.system.tracebacks import frames
from mpitrain.threads.draws import Draws
from mpitrain.threads.hub import CalledOffError, Hub
from mpitrain.threads.ranks import ThreadRanks
from mpitrain.training import signals
from mpitrain.training.families import FAMILIES, run_named
from mpitrain.training.session import Session, begin, prepare
from mpitrain.training.watchdog.watchdog import Watchdog

LOOK_S = 0.5  # between two looks whether a rank has failed that has not come to its end
ENDING_S = 10.0  # how long replicas have to come to their end once the run is over


class ThreadRun:
    """The threads of one run.

    Args:
        job: what is trained, its strategy in place; overrides: further options, as for the run over MPI.
        num_threads: replicas; servers come on top, each with a thread of its own.
        job_file: that the job was read from.
    """

    def __init__(self, job: Job, overrides: Overrides, num_threads: int, job_file: str | None = None):
        self.job, self.overrides, self.job_file = job, overrides, job_file
        self.strategy = job.run_strategy
        self.num_threads, num_servers = num_threads, self.strategy.num_servers()
        size, host = num_threads + num_servers, node_name()
        self.hub, draws = Hub(size), Draws()
        self.ranks = [
            ThreadRanks(self.hub, rank, host, Plan((0,) * size, "threads"), draws) for rank in range(size)
        ]
        for one in self.ranks:
            one.num_threads = num_threads
            one.local_rank = max(0, one.rank - num_servers)  # servers need no device
        self._jobs = [job if rank == num_servers else _copied(job) for rank in range(size)]
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._threads = [background.thread(f"rank-{one.rank}", self._run_rank, one) for one in self.ranks]

    @property
    def left(self) -> list[str]:
        """The threads that are still there."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def run(self) -> dict[str, Any]:
        """Train; returns what `result.json` holds.

        Raises:
            AgreedError: the input is wrong; it was said which and why.
            BaseException: the first failure of a rank, or the interrupt.
        """
        if line := torch_versions.untried():
            tell(f"mpitrain: warning: {line}")
        torch_versions.import_compiler()  # every optimizer needs it to step
        before = torch.get_num_threads()
        self.threads_each = max(1, before // self.num_threads)
        torch.set_num_threads(self.threads_each)  # of threads that start from here on
        self._report_status()
        signals.install()
        if self.strategy.never_meets:
            signals.end_at_once()  # it writes no checkpoints
        try:
            for thread in self._threads:
                thread.start()
            return self._wait()
        except BaseException as error:
            self.hub.fail("this process", error)
            raise
        finally:
            until_s = time.monotonic() + ENDING_S
            for thread in self._threads:
                thread.join(max(0.0, until_s - time.monotonic()))
            signals.uninstall()
            torch.set_num_threads(before)

    def _wait(self) -> dict[str, Any]:
        """Until all have come to the end, but for those that servers have given up."""
        found: dict[int, Any] = {}
        agreed: AgreedError | None = None
        while len(found) < len(self.ranks) - len(self.ranks[0].evicted - set(found)):
            if self.hub.failure is not None:
                raise self.hub.failure.error
            with contextlib.suppress(queue.Empty):  # a failed rank may be in the middle of something for long
                rank, ended = self._ended.get(timeout=LOOK_S)
                found[rank] = ended
                if isinstance(ended, AgreedError):
                    agreed = agreed or ended
        if self.hub.failure is not None:
            raise self.hub.failure.error
        if agreed is not None:
            raise agreed
        if self.left:
            self.hub.fail("the run", CalledOffError("it is over"))
        return dict(found[0])

    def _run_rank(self, ranks: ThreadRanks) -> None:
        """What one thread does, from its start to its end."""
        session: Session | None = None
        ended: Any = None
        try:
            torch.set_num_threads(self.threads_each)
            with background.failures_to(lambda error: self.hub.fail(ranks.where(), error)):
                session = prepare(ranks, lambda: self._jobs[ranks.rank], self.overrides, self.job_file)
                with Watchdog(ranks, session, self.overrides.watchdog_s):
                    begin(ranks)
                    ended = session.finish(run_named(session.strategy.choose(FAMILIES).threads, session))
        except AgreedError as error:
            ended = error
        except CalledOffError:
            pass
        except BaseException as error:
            self.hub.fail(ranks.where(), error)
            if ranks.run_dir is not None:
                _record(ranks, error)
        finally:
            if session is not None:
                session.report.close()
                session.close()
            self._ended.put((ranks.rank, ended))

    def _report_status(self) -> None:
        """To the `mpitrain launch` of this one process, if there is one."""
        reporter = rank_status.begin()
        if reporter is not None:
            reporter.observe = lambda: (
                all(one.waits for one in self.ranks),
                max(one.progress_s for one in self.ranks),
                max(one.step for one in self.ranks),
            )
            reporter.looks = True
            reporter.reach(rank_status.STARTED)


def train_in_threads(
    make_job: Callable[[], Job], overrides: Overrides, num_threads: int, job_file: str | None = None
) -> dict[str, Any]:
    """Train with `num_threads` replicas in this process; returns what `result.json` holds.

    Raises:
        UsageError, AgreedError: the input is wrong. Any other exception is that of the replica which has failed first;
            a note on it names the replica.
    """
    check_launch(num_threads)
    job = apply_overrides(make_job(), overrides)
    check(job, overrides, THREADS, num_threads)
    run = ThreadRun(job, overrides, num_threads, job_file)
    try:
        return run.run()
    except BaseException as error:
        failure = run.hub.failure
        if failure is not None and failure.error is error and not isinstance(error, KeyboardInterrupt):
            error.add_note(f"in {failure.where}, a thread of this process; the others were ended")
        raise


def threads_command(load: Callable[[], Job], overrides: Overrides, num_threads: int, path: str) -> int:
    """`mpitrain train --threads`: the exit code of the run."""
    try:
        code = int(train_in_threads(load, overrides, num_threads, path)["exit_code"])
    except AgreedError as error:
        code = error.exit_code
    except KeyboardInterrupt as error:
        code = exit_code(error)
        tell("mpitrain: interrupted")
    except MpitrainError as error:
        code = error.exit_code
        tell(f"mpitrain: error: {error}{_where(error)}")
    except Exception as error:
        code = exit_code(error)
        tell(frames(error), end="")
        tell(f"mpitrain: {type(error).__name__}: {error}{_where(error)}")
    rank_status.reach(rank_status.ENDED, code)
    signals.ignore()
    flush()
    if any(thread.name.startswith("mpitrain-rank-") for thread in threading.enumerate()):
        os._exit(code)  # one that does not come to its end must not be in torch while that is unloaded
    return code


def _where(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _record(ranks: ThreadRanks, error: BaseException) -> None:
    assert ranks.run_dir is not None
    try:
        write_record(ranks, ranks.run_dir, error)
    except OSError as failure:  # the error itself is what has to be reported
        tell(f"mpitrain: could not write the error report: {failure}")


def _copied(job: Job) -> Job:
    """The job for one more replica: with a model of its own, where the job holds the module itself, and with metrics
    that remember nothing of the others' batches."""
    changes: dict[str, Any] = {}
    if isinstance(job.model, nn.Module):
        changes["model"] = copy.deepcopy(job.model)
    if job.metrics is not None and not inspect.isfunction(job.metrics):
        changes["metrics"] = copy.deepcopy(job.metrics)
    return dataclasses.replace(job, **changes)


def check_launch(num_threads: int) -> None:
    """Refuse threads in each of several ranks.

    Raises:
        UsageError: says how many ranks there are.
    """
    if num_threads < 1:
        raise UsageError(f"--threads must be at least 1, got {num_threads}")
    task = launched_task()
    if task is not None and task.is_one_of_several():
        ranks = task.size or f"at least {task.rank + 1}"
        raise UsageError(
            f"--threads {num_threads} trains in one process, and this launch has {ranks} ranks: start it without a "
            "launcher, or leave --threads out and train over MPI"
        )
