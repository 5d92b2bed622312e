"""Faults at a rate: when they come, of which kind they are and whom they hit is drawn, for a whole run.

    --inject "poisson(mtbf_s=15)"  --inject "poisson(mtbf_s=60, kinds='kill,disk_full', seed=3)"

Invariants: a course of faults is a pure function of the run's seed, the order's and the number of workers, so that all
ranks draw the same, and a start of a run goes on where the one before has ended. Times count from the run's first
start; nothing here looks at a clock, and what falls due while nobody trains is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mpitrain.errors import UsageError
from mpitrain.inject.values import (
    LEAST_MTBF_S,
    SILENT,
    CorruptFile,
    DiskFull,
    Exit,
    FileFault,
    Injection,
    Kill,
    Nan,
    Raise,
    Segv,
    Stop,
    Torn,
    Wedge,
)
from mpitrain.values import nearest, register

KINDS: dict[str, type[Injection]] = {
    one.name: one for one in (Kill, Segv, Exit, Raise, Stop, Wedge, Nan, Torn, DiskFull, CorruptFile)
}
FILE_KINDS = tuple(name for name, one in KINDS.items() if issubclass(one, FileFault))


@register("inject", "poisson")
class Poisson(Injection):
    """Faults of all kinds during the whole run, over its restarts, at times that are drawn: a worker, or the next
    checkpoint, is hit after the first gradient from then on.

    Args:
        mtbf_s: mean time between two faults of the run, which is drawn from an exponential law.
        kinds: what is drawn, all alike, as in "kill,stop"; by default what the run survives or is started again from.
        seed: of the draws, besides the run's.
    """

    mtbf_s: float
    kinds: str = ""
    seed: int = 0

    def check(self) -> None:
        self.hold(
            "mtbf_s", LEAST_MTBF_S <= self.mtbf_s < math.inf, f"must be finite, and at least {LEAST_MTBF_S:g}"
        )
        for name in self.asked:
            if name not in KINDS:
                raise UsageError(f"{self.name}: unknown kind {name!r}{nearest(name, list(KINDS))}")

    @property
    def asked(self) -> tuple[str, ...]:
        """The kinds by name; empty where the run is to choose them."""
        return tuple(name.strip() for name in self.kinds.split(",") if name.strip())

    def draws(self, *kinds: type[Injection]) -> bool:
        """Whether one of these was asked for by name."""
        return any(issubclass(KINDS[name], kinds) for name in self.asked)


class Drawn(NamedTuple):
    """One fault: which of its course, `at_s` after the run's first start, its kind, and the worker's index (of files:
    nobody's)."""

    at_s: float
    number: int
    kind: str
    worker: int


def course(order: Poisson, run_seed: int, kinds: Sequence[str], num_workers: int) -> Iterator[Drawn]:
    """All faults of a run, one after another, without an end.

    Args:
        kinds: what is drawn where the order names nothing.
    """
    kinds, at_s = order.asked or tuple(kinds), 0.0
    for number in itertools.count():
        draw = random.Random(f"poisson/{run_seed}/{order.seed}/{number}")
        at_s -= order.mtbf_s * math.log(1.0 - draw.random())
        kind = kinds[int(draw.random() * len(kinds))]
        yield Drawn(at_s, number, kind, int(draw.random() * num_workers))


class Due:
    """What has fallen due of one or several courses for one rank, as time goes by.

    Args:
        courses: as `course` gives them.
        age_s: seconds since the run's first start, now.
        is_mine: whether a fault is this rank's; told: is called with each that is, before it happens.
    """

    def __init__(
        self, courses: Iterable[Iterator[Drawn]], age_s: Callable[[], float], is_mine: Callable[[Drawn], bool],
        told: Callable[[Drawn], None] = lambda fault: None,
    ):  # fmt: skip
        self._coming = heapq.merge(*courses)
        self._age_s, self._is_mine, self._told = age_s, is_mine, told
        self._next = next(self._coming)
        self.taken: list[str] = []
        self.pass_by()

    def pass_by(self) -> None:
        """Nobody was there until now: leave out what has fallen due."""
        list(self._until_now())

    def take(self) -> list[str]:
        """The kinds of this rank's faults that have fallen due since the last time."""
        mine = [fault for fault in self._until_now() if self._is_mine(fault)]
        self.taken += [fault.kind for fault in mine]
        for fault in mine:
            self._told(fault)
        return [fault.kind for fault in mine]

    def _until_now(self) -> Iterator[Drawn]:
        age_s = self._age_s()
        while self._next.at_s <= age_s:
            yield self._next
            self._next = next(self._coming)


def of_worker(worker: int) -> Callable[[Drawn], bool]:
    """Whether a fault hits the worker with this index."""
    return lambda fault: fault.worker == worker and fault.kind not in FILE_KINDS


def of_files(fault: Drawn) -> bool:
    """Whether a fault hits a part of a checkpoint."""
    return fault.kind in FILE_KINDS


def orders_among(injections: Iterable[Injection]) -> list[Poisson]:
    """What is to be drawn."""
    return [one for one in injections if isinstance(one, Poisson)]


def mtbf_of(injections: Iterable[Injection]) -> float:
    """Mean time between two drawn faults, of all orders together; infinite without any."""
    rate = sum(1 / one.mtbf_s for one in orders_among(injections))
    return 1 / rate if rate else math.inf


def asks_for(one: Injection, *kinds: type[Injection]) -> bool:
    """Whether this is one of these kinds, or draws them by name."""
    return isinstance(one, kinds) or (isinstance(one, Poisson) and one.draws(*kinds))


def falls_silent(injections: Iterable[Injection]) -> bool:
    """Whether somebody falls silent in virtual time."""
    return any(asks_for(one, *SILENT) for one in injections)
