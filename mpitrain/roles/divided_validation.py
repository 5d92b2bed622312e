"""A validation over parameter servers that all workers compute: the part of a worker.

Invariants: what is measured is what the validating worker held when it began, one definite version. It hands that to
the dealing server, which gives out units of the validation set, to it as to every worker that comes by; training goes
on meanwhile wherever it did. Nobody is waited for: a unit that somebody has claimed and not finished in the time of one
the validating worker computes itself, so a worker that dies, stalls or is busy costs no figure. Who computes a unit
changes no bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol, cast

from mpitrain.effects import Compute, Effect, Now, Recv, Send, Sleep
from mpitrain.messages import (
    AskAverage,
    Assist,
    Average,
    Claim,
    Divide,
    Measured,
    Message,
    Over,
    Payload,
    Unit,
)
from mpitrain.roles.row_pulls import RowPulls
from mpitrain.strategies.placement import Roles

Steps = Generator[Effect, Any, Any]
Receive = Callable[[Collection[int], bool], Generator[Effect, Any, tuple[int, Message]]]
LEAST_WAIT_S = 0.02  # for what others have claimed, where the worker has not measured how long a unit takes
NUM_LOOKS = 20  # at what has arrived, in the time of one unit


class Measures(Protocol):
    """A worker's validation set and what measures on it, opaque to the role."""

    @property
    def num_units(self) -> int:
        """Units that can be measured one by one; less than 2 where the set is too small to be divided."""

    @property
    def averages(self) -> bool:
        """Whether the moving average is measured as well, which the servers hold."""

    def begin(self, averages: dict[int, Payload]) -> None:
        """A validation of what the worker holds begins; `averages`: of each shard."""

    def snapshot(self) -> Payload:
        """All that another worker needs to measure the same."""

    def unit(self, unit: int, snapshot: Payload | None = None) -> Payload | None:
        """What a unit gives: of what this worker holds, or of another one's `snapshot`; None where rows of tables are
        missing."""

    def conclude(self, results: list[Payload], samples: int | None) -> dict[str, float]:
        """The figures of all units; `samples`: as for `Replica.validate`."""


class TabledMeasures(Measures, Protocol):
    """The same, where the model has tables."""

    def missing(self, unit: int, snapshot: Payload | None = None) -> dict[int, Payload]:
        """For each shard a question for the rows that the unit needs and are not here."""

    def hold(self, shard: int, payload: Payload) -> None:
        """Take the rows that were asked for; the payload is released."""


class DividedValidation:
    """What a worker does for validations, its own and those of others.

    Args:
        roles: everybody's; measures: of this worker.
        receive: waits for the next message, while the ranks that are named owe one.
        report_away: informs servers that the worker may be silent for as long as it takes, or (True) for a unit.
        step: of the worker's next push.
        row_pulls: asks for rows, where the model has tables.
    """

    def __init__(
        self,
        roles: Roles,
        measures: Measures,
        receive: Receive,
        report_away: Callable[[bool], Steps],
        step: Callable[[], int],
        row_pulls: RowPulls | None = None,
    ):
        self.roles, self.measures, self._row_pulls = roles, measures, row_pulls
        self._receive, self._report_away, self._step = receive, report_away, step
        self.early: deque[tuple[int, Message]] = deque()  # of training, and arrived during a validation
        self._results: dict[int, Payload] = {}
        self._number = 0  # of the own validation, as the dealing server counts
        self._arrived: list[Measured] = []  # before that is known
        self._unit_s = 0.0  # the longest so far

    def measure(self, samples: int | None) -> Steps:
        """Measure what this worker holds; returns the figures."""
        measures = self.measures
        averages: dict[int, Payload] = {}
        if measures.averages:
            averages = yield from self._averages()
        measures.begin(averages)
        num_units = max(1, measures.num_units)
        self._results, self._arrived, self._number, self._unit_s = {}, [], 0, 0.0
        if self._is_divided:
            payload = yield Compute(measures.snapshot, "validate", size=0.0)
            yield Send(self.roles.dealer, Divide(self._step(), num_units, payload))
            yield from self._take_units(num_units)
        for unit in range(num_units):
            if unit not in self._results:
                yield from self._wait_for(unit)
            if unit not in self._results:
                yield from self._compute(unit)
        if self._is_divided:
            yield Send(self.roles.dealer, Over(self._step()))
            yield from self._report_away(False)
        results, self._results = [self._results[unit] for unit in range(num_units)], {}
        return (yield Compute(lambda: measures.conclude(results, samples), "validate", size=0.0))

    def _averages(self) -> Steps:
        """The moving averages of all shards, by server."""
        for server in self.roles.servers:
            yield Send(server, AskAverage(self._step()))
        found: dict[int, Payload] = {}
        while len(found) < len(self.roles.servers):
            missing = [server for server in self.roles.servers if server not in found]
            source, message = yield from self._next(missing, Average)
            found[source] = message.payload
        return {shard: found[server] for shard, server in enumerate(self.roles.servers)}

    def _take_units(self, num_units: int) -> Steps:
        """Claim units until none is left, or all are measured."""
        while len(self._results) < num_units:
            yield Send(self.roles.dealer, Claim(self._step()))
            _, answer = yield from self._next((self.roles.dealer,), Unit)
            self._number = answer.number
            while self._arrived:
                self._keep(self._arrived.pop())
            if answer.unit < 0:
                return
            if answer.unit not in self._results:
                yield from self._compute(answer.unit)

    def _compute(self, unit: int) -> Steps:
        yield from self._report_away(True)
        began_s = yield Now()
        self._results[unit] = yield from self._measured(unit)
        self._unit_s = max(self._unit_s, (yield Now()) - began_s)

    def _wait_for(self, unit: int) -> Steps:
        """Another worker has claimed `unit`, and gets the time of one for it."""
        yield from self._report_away(True)
        yield from self._look()
        began_s = yield Now()
        wait_s = max(LEAST_WAIT_S, self._unit_s)
        while self._is_divided and unit not in self._results and (yield Now()) < began_s + wait_s:
            yield Sleep(wait_s / NUM_LOOKS, interruptible=False)
            yield from self._look()

    @property
    def _part(self) -> float:
        """Of the validation set in a unit."""
        return 1 / max(1, self.measures.num_units)

    @property
    def _is_divided(self) -> bool:
        """Whether anybody else measures."""
        return len(self.roles.workers) > 1 and self.measures.num_units > 1

    def _look(self) -> Steps:
        """Take in what has arrived."""
        while (arrived := (yield Recv(timeout_s=0))) is not None:
            self._take_in(*arrived)

    def _next(self, awaited: Collection[int], kind: type[Average] | type[Unit]) -> Steps:
        """The next message of that class; others are taken in, or wait."""
        while True:
            source, message = yield from self._receive(awaited, True)
            if isinstance(message, kind):
                return source, message
            self._take_in(source, message)

    def _take_in(self, source: int, message: Message) -> None:
        if isinstance(message, Measured):
            if self._number:
                self._keep(message)
            else:
                self._arrived.append(message)
        else:
            self.early.append((source, message))

    def _keep(self, message: Measured) -> None:
        if (
            message.number != self._number or message.unit in self._results
        ):  # of the validation before, or late
            message.payload.release()
        else:
            self._results[message.unit] = message.payload

    def assist(self) -> Steps:
        """Measure units of another worker's validation until none is left."""
        number, unit = 0, -1
        payload: Payload | None = None
        snapshot: Payload | None = None
        while True:
            yield Send(self.roles.dealer, Claim(self._step(), number, unit, payload))
            _, answer = yield from self._next((self.roles.dealer,), Unit)
            if answer.payload is not None:  # of this validation; the one before is over
                if snapshot is not None:
                    snapshot.release()
                snapshot = answer.payload
            number, unit, payload = answer.number, answer.unit, None
            if unit < 0 or snapshot is None:
                break
            yield from self._report_away(True)
            payload = yield from self._measured(unit, snapshot)
        if snapshot is not None:
            snapshot.release()

    def _measured(self, unit: int, snapshot: Payload | None = None) -> Steps:
        """What a unit gives, of what this worker holds or of a snapshot, with rows as they are now."""
        while True:
            if self._row_pulls is not None:
                measures = cast(TabledMeasures, self.measures)
                missing = functools.partial(measures.missing, unit, snapshot)
                yield from self._row_pulls.fetch(missing, measures.hold, trains=False)
            task = functools.partial(self.measures.unit, unit, snapshot)
            result = yield Compute(task, "validate", size=self._part)
            if result is not None:
                return result

    def receive(self, awaited: Collection[int], served: bool = True) -> Steps:
        """The next message of training; whoever is asked for help meanwhile, helps first."""
        while True:
            if self.early:
                source, message = self.early.popleft()
            else:
                source, message = yield from self._receive(awaited, served)
            if isinstance(message, Assist):
                yield from self.assist()
            elif isinstance(message, Measured):  # of a validation that is over
                message.payload.release()
            else:
                return source, message
