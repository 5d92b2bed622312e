"""What is to be trained next, decided from what every dealer has noted down.

    open --claimed--> running --ended--> ok | missed | failed | interrupted
                         |
                         `--its process is gone--> open again, at most MAX_DEATHS times

A task is a configuration's training up to a rung; without early stopping there is one rung, the whole training. Every
attempt at a task is claimed once, by one dealer.

Invariants: a pure function of the records; standard library only. What has ended well is not trained again.
"""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpitrain.reporting.targets import Choice
from mpitrain.search.sweep.asha import promotable

MAX_DEATHS = 3  # attempts whose process was killed, or whose node died, before a task counts as failed
DONE, MISSED, FAILED, INTERRUPTED, DIED = "ok", "missed", "failed", "interrupted", "died"


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
        unsure: whether some process that counts as living may turn out to be gone in a moment.
    """

    claimed: Mapping[Task, bool] = field(default_factory=dict)
    ended: Mapping[Task, Ended] = field(default_factory=dict)
    again: frozenset[Task] = frozenset()
    unsure: bool = False

    def status(self, task: Task) -> str:
        """Of one attempt: how it ended, "died", or "running"."""
        if task in self.ended:
            return self.ended[task].status
        return "running" if self.claimed[task] else DIED


class Progress(NamedTuple):
    """One configuration at one rung: its status ("open", "running", "ok", "missed" or "failed"), and the attempt that
    is next, or was the last."""

    status: str
    task: Task


def progress_at(records: Records, index: int, rung: int) -> Progress:
    """How far a configuration has come at a rung."""
    attempts = sorted(task for task in records.claimed if task[:2] == (index, rung))
    if not attempts:
        return Progress("open", Task(index, rung))
    last = attempts[-1]
    following = last._replace(attempt=last.attempt + 1)
    status = records.status(last)
    if status == DIED:
        deaths = [one for one in attempts if records.status(one) == DIED and one not in records.again]
        status = FAILED if len(deaths) >= MAX_DEATHS else INTERRUPTED
    if status == INTERRUPTED or (status == FAILED and last in records.again):
        return Progress("open", following)
    return Progress(status, last)


def all_progress(records: Records, num_configurations: int, num_rungs: int) -> list[list[Progress]]:
    """`progress_at` for every rung and every configuration, as [rung][index]."""
    by_place: dict[tuple[int, int], list[Task]] = {}
    for task in records.claimed:
        by_place.setdefault(task[:2], []).append(task)
    found = []
    for rung in range(num_rungs):
        row = []
        for index in range(num_configurations):
            mine = by_place.get((index, rung), [])
            one = Records({task: records.claimed[task] for task in mine}, records.ended, records.again)
            row.append(progress_at(one, index, rung))
        found.append(row)
    return found


def next_task(
    records: Records, num_configurations: int, num_rungs: int, by: Choice | None, reduction: int = 0
) -> Task | Answer:
    """What a dealer that is free trains next.

    Args:
        by: what rungs are compared by, where there are several, and `reduction` of the rule.
    """
    table = all_progress(records, num_configurations, num_rungs)
    for row in reversed(table[1:]):  # what was interrupted on a higher rung has been chosen already
        for one in row:
            if one.status == "open" and one.task.attempt:
                return one.task
    if num_rungs > 1:
        assert by is not None
        measured = [
            {one.task.number: _value(records, one) for one in row if one.status in (DONE, MISSED, FAILED)}
            for row in table
        ]
        begun = [
            {one.task.number for one in row if one.task.attempt or one.status != "open"} for row in table
        ]
        if chosen := promotable(measured, begun, by, reduction):
            return Task(*chosen)
    for number in shuffled(num_configurations) if num_rungs > 1 else range(num_configurations):
        if table[0][number].status == "open":
            return table[0][number].task
    may_open = records.unsure or (
        num_rungs > 1 and any(one.status == "running" for row in table[:-1] for one in row)
    )
    return Answer.WAIT if may_open else Answer.OVER


@functools.lru_cache(maxsize=4)
def shuffled(num_configurations: int) -> tuple[int, ...]:
    """In which order configurations begin under early stopping: of a grid in its own order each may beat those before
    it, and so most of them would go on."""
    order = list(range(num_configurations))
    random.Random(f"{num_configurations} configurations").shuffle(order)
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


def best_of(found: Sequence[Standing], by: Choice) -> Standing | None:
    """The best configuration that has been measured; of equals the first."""
    best: Standing | None = None
    for one in found:
        if one.status != FAILED and by.is_better(one.value, best.value if best else None):
            best = one
    return best
