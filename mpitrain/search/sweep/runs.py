"""A dealer's work: claim a task, have it trained, note down how it ended, until nothing is left.

Invariants: the command line of a task is a function of the plan, the configuration and the rung. What a run that
outlived its sweep has finished meanwhile is taken as it is, not trained again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpitrain.errors import EXIT_ENDED_AT_ONCE, EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, EXIT_TARGET_MISSED
from mpitrain.reporting.repetitions import measured
from mpitrain.reporting.targets import Choice, read_choice
from mpitrain.search.sweep.check import Setup
from mpitrain.search.sweep.deal import (
    DONE,
    FAILED,
    INTERRUPTED,
    MISSED,
    Answer,
    Ended,
    Task,
    is_last_chance,
    mean_of,
    meets_another,
    next_task,
    standings,
)
from mpitrain.search.sweep.journal import Dealer, Options, Sweep
from mpitrain.search.sweep.plan import Configuration
from mpitrain.system.files.run_directory import read_json
from mpitrain.system.files.run_lock import holder_lives
from mpitrain.system.processes import runs

LOOK_EVERY_S = 0.2
_STATUS = {
    EXIT_OK: DONE, EXIT_TARGET_MISSED: MISSED, EXIT_REQUEUE: INTERRUPTED, EXIT_INTERRUPTED: INTERRUPTED,
    EXIT_ENDED_AT_ONCE: INTERRUPTED,
}  # fmt: skip


class Trainer(Protocol):
    """Trains one task: the words are those of `train` after the job; returns the exit code and why it failed."""

    def __call__(self, task: Task, words: list[str], log: Path) -> tuple[int, str]: ...


class Proposer(Protocol):
    """Proposes configurations while the sweep runs."""

    def ask(self, number: int) -> Options:
        """A setting for the configuration of that number."""

    def tell(self, number: int, setting: Options, value: float | None) -> None:
        """What that setting has reached; None where it has failed."""


@dataclass(eq=False)
class Work:
    """What one dealer does; its threads may share it.

    Args:
        train: see `Trainer`. stopped: whether this dealer has been asked to end.
        proposer: of a sampler that proposes; None where the configurations are known.
    """

    sweep: Sweep
    setup: Setup
    dealer: Dealer
    train: Trainer
    stopped: Callable[[], bool]
    proposer: Proposer | None = None

    def run(self) -> float:
        """Train until nothing is left; returns the seconds in which something was."""
        busy_s = 0.0
        while (task := self.take()) is not None:
            busy_s += self.carry_out(task)
        return busy_s

    def take(self) -> Task | None:
        """The next task, claimed; waits for one as long as others may open one."""
        while not self.stopped():
            records = self.sweep.records(self.dealer)
            answer = next_task(
                records,
                self.setup.plan.num_configurations,
                self.setup.plan.num_rungs,
                self.setup.by,
                self.setup.reduction,
                self.setup.plan.settings,
                self.dealer.launch,
            )
            if isinstance(answer, Task):
                is_last = is_last_chance(records, answer)
                if self.dealer.claim(answer, is_last):
                    if not is_last or not meets_another(self.sweep.records(self.dealer), answer):
                        return answer
                    self.dealer.ended(answer, Ended(INTERRUPTED))  # another was claimed in the same moment
                    time.sleep(random.uniform(0, 5 * LOOK_EVERY_S))  # which may give way, too
            elif answer is Answer.OVER:
                return None
            else:
                time.sleep(LOOK_EVERY_S)
        return None

    def carry_out(self, task: Task) -> float:
        """Have a task trained, and note it down; returns the seconds it took."""
        began_s = time.monotonic()
        configuration = self.configuration(task.number)
        ended = self._finished_meanwhile(task)
        if ended is None:
            words = self.words(task, configuration)
            code, reason = self.train(task, words, self.sweep.log_file(task.number))
            result = self._result(task.number)
            ended = outcome(code, result, self.setup.by, reason)
            self._check_metric(ended, result)
        ended = ended._replace(busy_s=time.monotonic() - began_s)
        self.dealer.ended(task, ended)
        if self.proposer is not None:
            self._tell(self.proposer, task.number)
        return ended.busy_s

    def _tell(self, proposer: Proposer, number: int) -> None:
        """Report the mean of a setting, once all of its runs have come to their end."""
        first, records = number - number % self.setup.plan.num_repeats, self.sweep.records(self.dealer)
        mine = range(first, first + self.setup.plan.num_repeats)
        found = [
            one for one in standings(records, self.setup.plan.num_configurations, 1) if one.number in mine
        ]
        if all(one.status in (DONE, MISSED, FAILED) for one in found):
            setting = self.sweep.proposals()[first]
            proposer.tell(first, setting, mean_of([one.value for one in found]))

    def _check_metric(self, ended: Ended, result: Mapping[str, Any]) -> None:
        """Refuse a metric that the first run has not measured, before many more have not."""
        by, reported = self.setup.by, result.get("metrics") or {}
        if by is not None and ended.status in (DONE, MISSED) and by.metric not in reported:
            read_choice(by.metric, reported, "--metric")

    def configuration(self, index: int) -> Configuration:
        """The configuration of that number, which a sampler may have to propose now."""
        if self.setup.configurations:
            return self.setup.configurations[index]
        assert self.proposer is not None
        plan = self.setup.plan
        first = index - index % plan.num_repeats  # seeds and folds of a setting share one proposal
        setting = self.sweep.proposals().get(first)
        if setting is None:
            setting = self.sweep.settle(first, self.proposer.ask(first))
        return plan.repeated(index, setting)

    def words(self, task: Task, configuration: Configuration) -> list[str]:
        """The options of `train` for a task. A task that has failed before begins anew, any other goes on."""
        words = [*self.setup.plan.words, *configuration.words, *self._rung_words(task.rung)]
        records = self.sweep.records(self.dealer)
        before = task._replace(attempt=task.attempt - 1)
        words += [f"--run-dir={self.sweep.run_dir(task.number)}", "--quiet"]
        return words if before in records.again and task.rung == 0 else [*words, "--resume=auto"]

    def _rung_words(self, rung: int) -> list[str]:
        """Up to a rung, with a checkpoint there to go on from."""
        rungs = self.setup.plan.rungs
        if rung >= len(rungs) - 1:
            return []
        return [
            f"--epochs={rungs[rung]}",
            f"--checkpoint-every={rungs[rung] * self.setup.num_samples} samples",
        ]

    def _result(self, index: int) -> dict[str, Any]:
        return read_json(self.sweep.run_dir(index) / "result.json") or {}

    def _finished_meanwhile(self, task: Task) -> Ended | None:
        """How the attempt before has ended, whose process has gone on without its sweep; None if it has not."""
        if task.attempt == 0:
            return None
        before = task._replace(attempt=task.attempt - 1)
        run_dir = self.sweep.run_dir(task.number)
        process = self.sweep.process_of(before)
        while (runs(process) or holder_lives(run_dir) is True) and not self.stopped():
            time.sleep(LOOK_EVERY_S)
        if before in self.sweep.records(self.dealer).ended:
            return None
        result = self._result(task.number)
        finished = self.sweep.touched_s(run_dir / "result.json") > self.sweep.claimed_s(before)
        rungs = self.setup.plan.rungs
        if not finished or (rungs and result.get("epochs") != rungs[task.rung]):
            return None
        ended = outcome(int(result.get("exit_code", 1)), result, self.setup.by, "")
        return None if ended.status in (INTERRUPTED, FAILED) else ended


def outcome(code: int, result: Mapping[str, Any], by: Choice | None, reason: str) -> Ended:
    """How a run has ended, by its exit code and what it has left in `result.json`."""
    status = _STATUS.get(code, FAILED)
    if status == FAILED:
        return Ended(FAILED, None, 0, 0.0, reason or str(result.get("failure") or f"exit code {code}"))
    samples = int(result.get("samples") or 0) - int(result.get("resumed_from") or 0)
    return Ended(status, None if by is None else measured(result, by), samples)
