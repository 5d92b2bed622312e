"""What is to be trained next, decided from what every dealer has noted down.

    open --claimed--> running --ended--> ok | missed | failed | interrupted
                         |
                         `--its process is gone--> open again, at most MAX_DEATHS times

A task is a configuration's training up to a rung; without early stopping there is one rung, the whole training. Every
attempt at a task is claimed once, by one dealer. Configurations that differ in seed and fold alone repeat one setting:
settings are what is compared, and all of a setting's configurations go on to a rung together.

A process that dies may take all of its launch with it, so that others' tasks seem to have died. One that has a single
death left is therefore begun where no other such one runs in the launch; if it dies, it has died, and those beside it
are excused.

Invariants: a pure function of the records; standard library only. What has ended well is not trained again.
"""

from __future__ import annotations

import enum
import functools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpitrain.reporting.targets import Choice
from mpitrain.search.sweep.asha import promotable

MAX_DEATHS = 3  # attempts whose process was killed, or whose node died, before a task counts as failed
DONE, MISSED, FAILED, INTERRUPTED, DIED = "ok", "missed", "failed", "interrupted", "died"


Settings = Sequence[Sequence[int]]  # the numbers of the configurations of each


class Task(NamedTuple):
    """One attempt at training a configuration up to a rung."""

    number: int
    rung: int = 0
    attempt: int = 0


class Ended(NamedTuple):
    """How an attempt ended.

    Attributes:
        status: "ok", "missed" (a target), "failed" or "interrupted" (it was asked to end, and goes on another time).
        value: of the sweep's metric, None where nothing was measured.
        samples: that this attempt has trained on; busy_s: seconds it took.
        run_dir: of the run; reason: why it has failed.
    """

    status: str
    value: float | None = None
    samples: int = 0
    busy_s: float = 0.0
    reason: str = ""


class Answer(enum.Enum):
    """To a dealer for whom there is no task: others still train what may open one, or nothing is left."""

    WAIT = "wait"
    OVER = "over"


@dataclass
class Records:
    """Everything that is known of a sweep.

    Attributes:
        claimed: every attempt, and whether the process that has claimed it may still be at it.
        ended: every attempt that was ended in order.
        again: attempts that have failed and are to be repeated all the same (`--rerun`).
        launches: of attempts that others' deaths end, too: the launch of ranks that each was a part of.
        last: attempts that were begun as their task's last chance.
        unsure: whether some process that counts as living may turn out to be gone in a moment.
    """

    claimed: Mapping[Task, bool] = field(default_factory=dict)
    ended: Mapping[Task, Ended] = field(default_factory=dict)
    again: frozenset[Task] = frozenset()
    launches: Mapping[Task, str] = field(default_factory=dict)
    last: frozenset[Task] = frozenset()
    unsure: bool = False

    def status(self, task: Task) -> str:
        """Of one attempt: how it ended, "died", or "running"."""
        if task in self.ended:
            return self.ended[task].status
        return "running" if self.claimed[task] else DIED


class Progress(NamedTuple):
    """One configuration at one rung: its status ("open", "running", "ok", "missed" or "failed"), the attempt that is
    next, or was the last, and how many have died."""

    status: str
    task: Task
    num_deaths: int = 0

    @property
    def is_last_chance(self) -> bool:
        """Whether one more death would be its last."""
        return self.num_deaths == MAX_DEATHS - 1


def progress_at(records: Records, index: int, rung: int, attempts: Sequence[Task]) -> Progress:
    """How far a configuration has come at a rung, of which these are the attempts."""
    if not attempts:
        return Progress("open", Task(index, rung))
    last = max(attempts)
    following = last._replace(attempt=last.attempt + 1)
    status = records.status(last)
    num_deaths = sum(_counts_as_death(records, one) for one in attempts)
    if status == DIED:
        status = FAILED if num_deaths >= MAX_DEATHS else INTERRUPTED
    if status == INTERRUPTED or (status == FAILED and last in records.again):
        return Progress("open", following, num_deaths)
    return Progress(status, last, num_deaths)


def _counts_as_death(records: Records, task: Task) -> bool:
    if records.status(task) != DIED or task in records.again:
        return False
    return task in records.last or not any(records.status(one) == DIED for one in _beside(records, task))


def _beside(records: Records, task: Task) -> list[Task]:
    """The last chances of other tasks in the launch of an attempt."""
    found = _last_chances(records, records.launches.get(task, ""))
    return [one for one in found if one[:2] != task[:2]]


def _last_chances(records: Records, launch: str) -> list[Task]:
    """Those that were begun in a launch of ranks."""
    return [one for one in records.last if launch and records.launches.get(one) == launch]


def is_last_chance(records: Records, task: Task) -> bool:
    """Whether one more death would be its last, of an attempt that is not claimed yet."""
    attempts = [one for one in records.claimed if one[:2] == task[:2]]
    return progress_at(records, task.number, task.rung, attempts).is_last_chance


def meets_another(records: Records, task: Task) -> bool:
    """Whether an attempt that was begun as its task's last chance is not the only such one in its launch."""
    return any(records.status(one) == "running" for one in _beside(records, task))


def all_progress(records: Records, num_configurations: int, num_rungs: int) -> list[list[Progress]]:
    """`progress_at` for every rung and every configuration, as [rung][index]."""
    by_place: dict[tuple[int, int], list[Task]] = {}
    for task in records.claimed:
        by_place.setdefault(task[:2], []).append(task)
    return [
        [
            progress_at(records, index, rung, by_place.get((index, rung), ()))
            for index in range(num_configurations)
        ]
        for rung in range(num_rungs)
    ]


def next_task(
    records: Records,
    num_configurations: int,
    num_rungs: int,
    by: Choice | None,
    reduction: int = 0,
    settings: Settings | None = None,
    launch: str = "",
) -> Task | Answer:
    """What a dealer that is free trains next.

    Args:
        by: what rungs are compared by, where there are several, and `reduction` of the rule.
        settings: the numbers of the configurations of each; None: every configuration is one.
        launch: of ranks, that the dealer is a part of.
    """
    settings = settings or [(number,) for number in range(num_configurations)]
    table = all_progress(records, num_configurations, num_rungs)
    is_taken = any(records.status(one) == "running" for one in _last_chances(records, launch))
    waits = [[is_taken and one.status == "open" and one.is_last_chance for one in row] for row in table]
    begun = [{at for at, those in enumerate(settings) if _has_begun(row, those)} for row in table]
    for rung in range(num_rungs - 1, 0, -1):  # whose setting has come to a higher rung was chosen already
        for number in (number for at in sorted(begun[rung]) for number in settings[at]):
            if table[rung][number].status == "open" and not waits[rung][number]:
                return table[rung][number].task
    if num_rungs > 1:
        assert by is not None
        measured = [_measured(records, row, settings) for row in table]
        if chosen := promotable(measured, begun, by, reduction):
            at, rung = chosen
            return Task(settings[at][0], rung)
    order = shuffled(len(settings)) if num_rungs > 1 else range(len(settings))
    for number in (number for at in order for number in settings[at]):
        if table[0][number].status == "open" and not waits[0][number]:
            return table[0][number].task
    may_open = (
        records.unsure
        or any(map(any, waits))
        or (num_rungs > 1 and any(one.status == "running" for row in table[:-1] for one in row))
    )
    return Answer.WAIT if may_open else Answer.OVER


def _has_begun(row: Sequence[Progress], numbers: Sequence[int]) -> bool:
    """Whether any of a setting's configurations trains for a rung, or has done so."""
    return any(row[number].task.attempt or row[number].status != "open" for number in numbers)


def _measured(records: Records, row: Sequence[Progress], settings: Settings) -> dict[int, float | None]:
    """What the settings have reached at a rung that all of their configurations have come to; None where one failed."""
    return {
        at: mean_of([_value(records, row[number]) for number in those])
        for at, those in enumerate(settings)
        if all(row[number].status in (DONE, MISSED, FAILED) for number in those)
    }


def mean_of(values: Sequence[float | None]) -> float | None:
    """None where one of them is, or is not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if len(known) == len(values) else None


@functools.lru_cache(maxsize=4)
def shuffled(number: int) -> tuple[int, ...]:
    """In which order settings begin under early stopping: of a grid in its own order each may beat those before it, and
    so most of them would go on."""
    order = list(range(number))
    random.Random(f"{number} configurations").shuffle(order)
    return tuple(order)


def _value(records: Records, one: Progress) -> float | None:
    ended = records.ended.get(one.task)
    return None if ended is None or one.status == FAILED else ended.value


class Standing(NamedTuple):
    """How a configuration stands: at its highest rung so far.

    status: "open", "running", "ok", "missed", "failed" or "stopped" (others were better); value: of the metric.
    """

    number: int
    status: str
    rung: int
    value: float | None
    reason: str = ""


def standings(records: Records, num_configurations: int, num_rungs: int) -> list[Standing]:
    """Of every configuration, in order."""
    table, found = all_progress(records, num_configurations, num_rungs), []
    for index in range(num_configurations):
        begun = [
            rung
            for rung in range(num_rungs)
            if table[rung][index].status != "open" or table[rung][index].task.attempt
        ]
        rung = begun[-1] if begun else 0
        one = table[rung][index]
        status = "stopped" if one.status in (DONE, MISSED) and rung < num_rungs - 1 else one.status
        ended = records.ended.get(one.task)
        value = next(
            (v for r in reversed(begun) if (v := _value(records, table[r][index])) is not None), None
        )
        reason = ended.reason if ended else "its process was killed" * (status == FAILED)
        found.append(Standing(index, status, rung, value, reason))
    return found


@dataclass(frozen=True)
class Compared:
    """A setting beside others: the numbers of its configurations, the highest rung that all of them have been measured
    at, and mean and spread of them there (None where one has failed, and a spread of one)."""

    numbers: tuple[int, ...]
    rung: int
    mean: float | None
    spread: float | None

    @property
    def name(self) -> str:
        """For messages."""
        return f"configuration {self.numbers[0]}"


def compare_settings(
    records: Records, num_configurations: int, num_rungs: int, settings: Settings
) -> list[Compared]:
    """Of every setting, in order."""
    table, found = all_progress(records, num_configurations, num_rungs), []
    for those in settings:
        mean, spread, rung = None, None, 0
        failed = any(row[number].status == FAILED for row in table for number in those)
        for rung in range(num_rungs - 1, -1, -1) if not failed else ():
            values = [_value(records, table[rung][number]) for number in those]
            mean = mean_of(values)
            if mean is not None:
                spread = statistics.stdev([value or 0.0 for value in values]) if len(values) > 1 else None
                break
        found.append(Compared(tuple(those), rung, mean, spread))
    return found


def best_of(found: Sequence[Compared], by: Choice) -> Compared | None:
    """The best setting that has been measured; of equals the first."""
    best: Compared | None = None
    for one in found:
        if by.is_better(one.mean, best.mean if best else None):
            best = one
    return best
