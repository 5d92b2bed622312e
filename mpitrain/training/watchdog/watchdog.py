"""The watchdog: a rank that neither works nor waits for others for too long raises the alarm and ends the job.

Invariants: the watchdog is a thread that calls neither MPI nor a device, so it works while the main thread is stuck in
either. Progress is any step, push, answer or validation batch of this rank. A rank that waits for another one (in a
warm-up, or while that one validates) does not hang, for the rank that hangs has a watchdog of its own. A process that
is stopped has none that runs: a rank that has waited for long asks which ranks still answer (`liveness.py`). A rank
that twice does not answer is ended by a rank on its host where the others go on without it, and named by the alarm
otherwise. Where all ranks answer and wait for one another, a rank that has waited for `PATIENCE` times as long looks at
the metrics file to see whether the run still moves. Every rank that sees the alarm writes its stacks, and its part of
an emergency checkpoint, before the rank that raised it ends the job; the launcher then starts the run again from there.
A rank that is stuck, and that the others go on without (`fault_tolerance.py`), raises no alarm: it writes its own
stacks and dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from mpitrain.checkpoint import newest
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.reporting.rows import METRICS_FILE
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.placement import Roles
from mpitrain.system import background
from mpitrain.system.files.folders import make_private
from mpitrain.system.optional import optional
from mpitrain.system.processes import place, send_signal
from mpitrain.system.saying import tell
from mpitrain.training.watchdog.alarm_files import Alarm
from mpitrain.training.watchdog.emergency import Emergency
from mpitrain.training.watchdog.liveness import LivenessCheck

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks

PATIENCE = 4
LOOK_EVERY_S = 2.0
# How long to wait for ranks that do not answer, beside one round of looking. A network file system may show a new name
# on other hosts a minute later, and a long watchdog has the time to wait for that.
GRACE_S, SLOW_GRACE_S = 10.0, 70.0
WRITING_S = 60.0  # longest time to wait for an emergency checkpoint


class StalledError(MpitrainError):
    """No progress within the watchdog's time; `ends_all`: of the whole run, not of this rank alone."""

    ends_all = False


class Watched(Protocol):
    """What a watchdog asks of what it watches, a `Session` as a rule."""

    run_dir: Path
    roles: Roles
    emergency: Emergency | None
    why_no_emergency: str

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""


@dataclasses.dataclass
class _WatchedLoop:
    run_dir: Path
    strategy: Strategy
    roles: Roles
    emergency: Emergency | None = None
    why_no_emergency: str = "a loop of one's own goes on from what mpitrain.save wrote"


class Watchdog:
    """Watches `runtime.stamp_s`; a context manager for the time in which progress is owed, entered by all ranks.

    Args:
        runtime: this process's; session: of the run: where the stacks go, as `stacks/rank-N.txt`, and its `emergency`.
        timeout_s: longest time without progress; 0 is no watchdog.
    """

    option = "--watchdog-s"

    def __init__(self, runtime: Ranks, session: Watched, timeout_s: float):
        self.runtime, self.session, self.timeout_s = runtime, session, timeout_s
        self.run_dir: Path = session.run_dir
        self.metrics: Path = self.run_dir / METRICS_FILE
        self.look_s = min(LOOK_EVERY_S, timeout_s / 4)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._metrics_seen: tuple[int, float] | None = None  # when they were written, and since when we know
        self._asked_s = 0.0  # idle seconds at the last liveness check

    @property
    def patience_s(self) -> float:
        """How long to wait for ranks that do not answer."""
        return self.look_s + min(SLOW_GRACE_S, max(GRACE_S, self.timeout_s / 10))

    def __enter__(self) -> Self:
        start = self.runtime.broadcast(time.time_ns())
        self.alarm = Alarm(self.run_dir, self.runtime.launched_rank, start)
        if self.timeout_s > 0:
            # every rank looks for two folders: some hundred times a second are enough for a file system
            self.look_s = min(LOOK_EVERY_S + self.runtime.size / 500, self.timeout_s / 4)
            self.runtime.stamp()
            self.liveness = LivenessCheck(self.run_dir, self.runtime.launched_rank, start)
            self._thread = background.start("watchdog", self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            # a caller that trains again finds no thread of this run; a file system that hangs may keep the thread
            self._thread.join(GRACE_S)

    def _watch(self) -> None:
        seen = False
        while not self._over.wait(self.look_s):
            if self.runtime.arriving:
                self.runtime.stamp_waiting()
            with optional("the answer of the watchdog"):
                self.liveness.answer()
            if self._is_stuck():
                self._end_job(seen)
                return
            if (silent := self._who_is_silent()) and not self._others_end(silent):
                self._end_job(seen, silent)
                return
            if not seen and (stuck := self._alarmed()):
                seen = True
                self._write(
                    f"{self.runtime.where()}: rank {stuck[0]} saw no progress, and asks all for their stacks"
                )

    def _alarmed(self) -> list[int]:
        """Who has raised the alarm; nobody, while the run directory is away."""
        with contextlib.suppress(OSError):
            return self.alarm.raised_by()
        return []

    def _is_stuck(self) -> bool:
        if self.runtime.stuck_s() > self.timeout_s:
            return True
        idle_s = self.runtime.idle_s()
        if idle_s <= self.timeout_s:
            return False
        quiet_s = self._quiet_s()  # looked at from here on, so that it is known when it matters
        return idle_s > PATIENCE * self.timeout_s and quiet_s > self.timeout_s

    def _who_is_silent(self) -> set[int]:
        """Ranks at launch that do not answer, asked after every `timeout_s` in which this one has only waited."""
        idle_s = self.runtime.idle_s()
        if idle_s < self._asked_s:  # there was progress
            self._asked_s = 0.0
        if idle_s - self._asked_s <= self.timeout_s:
            return set()
        self._asked_s = idle_s
        living = set(self.runtime.launched) - self._given_up()
        for _ in range(2):
            living &= self.liveness.ask(living, self.patience_s, lambda: self._is_settled(idle_s))
        return living & set(self.runtime.launched)

    def _is_settled(self, idle_s: float) -> bool:
        """Whether the liveness check may end early: a rank that has raised the alarm does not answer, but waits for
        our stacks."""
        return self._over.is_set() or self.runtime.idle_s() < idle_s or bool(self._alarmed())

    def _given_up(self) -> set[int]:
        return {
            self.runtime.launched[rank] for rank in self.runtime.evicted if rank < len(self.runtime.launched)
        }

    def _others_end(self, silent: set[int]) -> bool:
        """Whether the run goes on without the silent ranks: servers evict them; under ULFM a rank on their host ends
        them, and MPI then reports their death to all."""
        if self.session.strategy.has_servers:
            roles = self.session.roles
            return self.runtime.idle_s() < PATIENCE * self.timeout_s and not silent.intersection(
                (*roles.servers, *roles.aggregators)
            )
        if not (self.runtime.fault_tolerance == "ulfm" and self.runtime.survives_shrink):
            return False
        left = [
            process
            for rank, process in zip(self.runtime.launched, self.runtime.processes)
            if rank not in silent
        ]
        places = {place(process) for process in left}
        if not all(place(self._process(rank)) in places for rank in silent):
            return False
        for rank in silent:
            if send_signal(self._process(rank), signal.SIGKILL):
                text = f"{self._named({rank})} stands still and was ended; the others go on"
                tell(f"mpitrain: {self.runtime.where()}: {text}")
        return True

    def _process(self, rank: int) -> str:
        return str(self.runtime.processes[self.runtime.launched.index(rank)])

    def _named(self, ranks: set[int]) -> str:
        """ "rank 2 on host n7"."""
        hosts = dict(zip(self.runtime.launched, self.runtime.hosts))
        return ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in sorted(ranks))

    def _quiet_s(self) -> float:
        """Seconds since this rank first saw the run's metrics as they are: no clocks of two hosts are compared."""
        try:
            written_ns = self.metrics.stat().st_mtime_ns
        except OSError:
            written_ns = 0
        if self._metrics_seen is None or self._metrics_seen[0] != written_ns:
            self._metrics_seen = written_ns, time.monotonic()
        return time.monotonic() - self._metrics_seen[1]

    def _end_job(self, seen: bool, silent: set[int] | None = None) -> None:
        """End the job, whatever the file system does: see `mpi/faults/abort.py`.

        Args:
            seen: this rank has seen the alarm of another one, and is writing; silent: the ranks that do not answer.
        """
        what = f"{self.runtime.where()}: no progress for {self.timeout_s:g} s"
        if silent:
            what += f", because {self._named(silent)} stands still: it does not answer"
        is_stuck = self.runtime.stuck_s() > self.timeout_s
        outcome = "; it dies alone, and the others go on"
        try:
            if is_stuck and self._dies_alone():
                self._write_stacks(what)
            else:
                self.alarm.raise_alarm()
                if not seen:
                    background.start("stacks", self._write, what)
                answering = set(self.runtime.launched) - (silent or set())
                outcome = self._outcome(
                    self.alarm.wait(answering, self.patience_s, self.patience_s + WRITING_S)
                )
        except Exception as error:
            outcome = f"; and what is known could not be written: {type(error).__name__}: {error}"
        for rank in silent or ():
            send_signal(self._process(rank), signal.SIGKILL)
        stalled = StalledError(
            f"{what} ({self.option}); the stacks of its threads: {self.alarm.stacks}{outcome}"
        )
        stalled.ends_all = not (is_stuck and self._dies_alone())
        raise stalled

    def _dies_alone(self) -> bool:
        """Whether the others go on without this rank."""
        runtime = self.runtime
        if runtime.fault_tolerance == "heartbeat":
            return bool(runtime.may_die_alone and runtime.rank != 0)
        return bool(runtime.fault_tolerance == "ulfm" and (runtime.may_die_alone or runtime.survives_shrink))

    def _outcome(self, outcomes: dict[int, str]) -> str:
        """What came of the alarm, for the error message; `outcomes`: what ranks have left (`Alarm.wait`)."""
        missing = sorted(set(self.runtime.launched) - set(outcomes))
        stacks = f"; stacks of {len(outcomes)} of {len(outcomes) + len(missing)} ranks are there"
        stacks += f" (none of rank {', '.join(map(str, missing))})" if missing else ""
        why_not = [f"rank {rank}: {text}" for rank, text in outcomes.items() if text]
        announced = self.alarm.announced(0.0)
        if announced is not None:
            with contextlib.suppress(CheckpointError):
                found = newest(self.run_dir)
                if found is not None and found.checkpoint_at == announced.checkpoint_at:
                    return (
                        f"{stacks}; emergency checkpoint at {announced.checkpoint_at} samples: {found.folder}"
                    )
        return f"{stacks}; no emergency checkpoint: {'; '.join(why_not) or 'a part of it was not written in time'}"

    def _write(self, head: str) -> None:
        """Stacks first, then this rank's part of an emergency checkpoint."""
        why_not = self.session.why_no_emergency
        try:
            self.alarm.begin()
            self._write_stacks(head)
            if self.session.emergency is not None:
                self.session.emergency.write(self.alarm)
        except CheckpointError as error:
            why_not = str(error)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            if why_not:
                with open(self.alarm.stacks, "a", encoding="utf-8") as file:
                    file.write(f"\nno emergency checkpoint: {why_not}\n")
            self.alarm.end(why_not)

    def _write_stacks(self, head: str) -> None:
        make_private(self.alarm.run_dir, self.alarm.stacks.parent.name)
        with open(self.alarm.stacks, "w", encoding="utf-8") as file:
            file.write(f"{head}\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)


class LoopWatchdog(Watchdog):
    """The watchdog of a loop of the user's own, whose `run_dir` need not exist before there is an alarm."""

    option = "watchdog_s= of mpitrain.wrap"

    def __init__(self, runtime: Ranks, run_dir: Path, strategy: Strategy, roles: Roles, timeout_s: float):
        super().__init__(runtime, _WatchedLoop(run_dir, strategy, roles), timeout_s)
