"""Servers that clip the mean gradient of an update by its norm, of which each shard knows a part.

    |g|^2 = sum over the shards of |g of the shard|^2

Every server sends every other one the squares of its part, once an update, and makes its update when it has all of
them. The n-th update of one shard goes with the n-th of the others, counted from the start of this run.

Invariants: all servers take up the workers' messages in the same order, that of the dealing server, which sends it to
the others. So each update is of the same gradients on all shards. Only where a worker dies between its messages to two
servers may they differ: another server then makes the dealing server's update with what it has, be it nothing, before
it takes up what the dealing server took up after that update; that the worker is lost it takes up in its turn, too. And
nobody waits for a server that makes no further update: it says so (`Ended`). While a server waits for the others it
goes on answering signs of life; all else is put off until its update is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, Protocol, cast

from mpitrain.effects import Compute, Effect, Role, Send
from mpitrain.messages import (
    AskAverage,
    Ended,
    Lost,
    Message,
    Note,
    Ordered,
    PartialNorm,
    PullRows,
)
from mpitrain.roles.failure_detector.server_side import FailureDetector
from mpitrain.roles.server.fault_tolerant import FaultTolerantServer
from mpitrain.roles.server.server import Steps
from mpitrain.roles.server.validation_units import OF_VALIDATIONS
from mpitrain.strategies.base import Verdict

Arrived = tuple[int, Message]
UNORDERED = (
    Note,
    AskAverage,
    PullRows,
    *OF_VALIDATIONS,
)  # they change no update, or come to the dealing server alone


class NormedStore(Protocol):
    """What such a server needs of its store besides."""

    def mean_squares(self) -> float:
        """Make the mean of what has been gathered; returns the sum of its squares."""

    def apply(self, norm: float | None = None) -> None:
        """One optimizer step with that mean, clipped as a part of a gradient of this norm."""


class NormExchange:
    """What one server knows of the others' parts.

    Args:
        others: the ranks of the other servers.
    """

    def __init__(self, others: Iterable[int]):
        self.others = tuple(others)
        self.number = 0  # of updates begun
        self.ended: set[int] = set()
        self._squares: dict[int, dict[int, float]] = {}

    def hear_norm(self, source: int, message: PartialNorm | Ended) -> None:
        """Another server's part, or that no more comes from it."""
        if isinstance(message, Ended):
            self.ended.add(source)
        else:
            self._squares.setdefault(message.update, {})[source] = message.squares

    def begin(self, squares: float) -> int:
        """This server's own part of its next update, whose number is returned."""
        self.number += 1
        self._squares.setdefault(self.number, {})[-1] = squares
        return self.number

    def is_whole(self, number: int) -> bool:
        """Whether all parts of this update are here that will come."""
        return set(self.others) <= self.ended | set(self._squares[number])

    @property
    def leader(self) -> int:
        """The dealing server, of another one."""
        return min(self.others)

    @property
    def is_behind(self) -> bool:
        """Whether the dealing server has begun an update that this one has not."""
        return self.leader in self._squares.get(self.number + 1, {})

    def take_norm(self, number: int) -> float:
        """The norm of the update."""
        squares = self._squares.pop(number)
        return float(sum(sorted(squares.values())) ** 0.5)


class _Listener(FailureDetector):
    """Hears other servers, too, and takes up what workers send when its turn has come.

    Args:
        exchange: takes what servers send; before: is run before listening; passed: is told of a worker of which
            what was due does not come.
        leads: takes up messages as they come; otherwise in the order that is heard.
    """

    def __init__(
        self, exchange: NormExchange, before: Callable[[], Steps], passed: Callable[[int], None], leads: bool,
        *arguments: Any,
    ):  # fmt: skip
        super().__init__(*arguments)
        self.exchange, self.before, self.passed, self.leads = exchange, before, passed, leads
        self.waits_for_servers = False  # everything else is put off
        self.serves = True  # or else no update follows, and no order matters any more
        self._put_off: deque[Arrived] = deque()
        self._order: deque[Ordered] = deque()

    def listen(
        self, owing: Collection[int], away_s: float = float("inf")
    ) -> Generator[Effect, Any, Arrived | None]:
        yield from self.before()
        if (due := self._due()) is not None:
            return due
        follows = self.serves and not self.leads  # who is silent the dealing server finds out
        arrived = yield from super().listen(() if follows or self.waits_for_servers else owing, away_s)
        if arrived is None:
            return None
        source, message = arrived
        if isinstance(message, PartialNorm | Ended):
            self.exchange.hear_norm(source, message)
        elif isinstance(message, Ordered):
            self._order.append(message)
        else:
            self._put_off.append(arrived)
        return self._due()

    @property
    def is_behind(self) -> bool:
        """Whether an update of the dealing server is due here, for want of a message that a worker died before: all
        that was taken up before it was taken up here."""
        if self.leads or not self.serves or self.waits_for_servers:
            return False
        following = self._following()
        return self.exchange.is_behind if following is None else self.exchange.number < following.update

    def _following(self) -> Ordered | None:
        """What the dealing server has taken up next, as far as it is known, and comes here, too."""
        while self._order and self._is_missing(self._order[0]):
            self.passed(self._order.popleft().worker)
        return self._order[0] if self._order else None

    def _is_missing(self, ordered: Ordered) -> bool:
        """Whether the worker is lost, or has died before it could send this shard the same."""
        if self.is_lost(ordered.worker):
            return True
        first = next((message for source, message in self._put_off if source == ordered.worker), None)
        return isinstance(first, Lost) and not ordered.how

    def _due(self) -> Arrived | None:
        """What is to be taken up next, if it is here."""
        if self.waits_for_servers:
            return None
        if self.leads or not self.serves:
            return self._put_off.popleft() if self._put_off else None
        for arrived in self._put_off:
            if self.is_lost(arrived[0]) or isinstance(arrived[1], UNORDERED):
                self._put_off.remove(arrived)
                return arrived
        following = self._following()
        if following is None:
            return self._last_loss()
        if self.exchange.number < following.update:
            return None
        worker, how = following.worker, following.how
        if how:
            self._order.popleft()
            return worker, Lost(how)
        for arrived in self._put_off:
            if arrived[0] == worker:
                self._order.popleft()
                self._put_off.remove(arrived)
                return arrived
        return None

    def _last_loss(self) -> Arrived | None:
        """That a worker is lost whose turn will not come: the dealing server has ended without it."""
        if self.exchange.leader in self.exchange.ended:
            for arrived in self._put_off:
                if isinstance(arrived[1], Lost):
                    self._put_off.remove(arrived)
                    return arrived
        return None


class ClippingServer(FaultTolerantServer):
    """`FaultTolerantServer`, where other servers hold parts of the gradient; the arguments are the same, and

    Args:
        others: the ranks of the other servers.
    """

    def __init__(self, *args: Any, others: Iterable[int], by_heartbeat: bool = False, **options: Any):
        super().__init__(*args, by_heartbeat=by_heartbeat, **options)
        self.exchange = NormExchange(others)
        self.leads = self.leases.dealer is not None
        self.detector = self._listener = _Listener(
            self.exchange,
            self._before_listening,
            self.gathering.pass_over,  # or else nobody behind it would find room
            self.leads,
            self.tracker,
            self.table.is_lost,
            by_heartbeat,
            self._upto,
        )
        self._has_ended = False

    def run(self) -> Role:
        """Serve until every worker has left, or is lost, and no other server has anything to say."""
        yield from super().run()
        while set(self.exchange.others) - self.exchange.ended:
            arrived = yield from self.detector.listen(())
            if arrived is not None and not isinstance(arrived[1], Lost):
                yield from self.turn_away(*arrived)
        return self.summary()

    def _next(self) -> Generator[Any, Any, Arrived | None]:
        arrived = yield from super()._next()
        if arrived is None:
            self._listener.serves = False
            yield from self._end()
        elif self.leads and not isinstance(arrived[1], UNORDERED):
            yield from self._inform(Ordered(arrived[0], update=self.exchange.number))
        return arrived

    def _lose(self, worker: int, how: str) -> Steps:
        if self.leads and not self.table.is_lost(worker):
            yield from self._inform(Ordered(worker, how, self.exchange.number))
        yield from super()._lose(worker, how)

    def _look_for_silence(self, now_s: float) -> Steps:
        if self.leads:
            yield from super()._look_for_silence(now_s)

    def _inform(self, message: Ordered | PartialNorm | Ended) -> Steps:
        for other in self.exchange.others:
            yield Send(other, message)

    def _before_listening(self) -> Steps:
        if self._over:  # what is still gathered is of no use to the others
            yield from self._end()
        elif self._listener.is_behind:
            yield from self._carry_out(Verdict(0.0, True, tuple(sorted(self.table.blocked))))

    def _end(self) -> Steps:
        if not self._has_ended:
            self._has_ended = True
            yield from self._inform(Ended())

    def _apply(self) -> Steps:
        is_empty, store = self.gathering.empty, cast(NormedStore, self.store)
        squares = 0.0 if is_empty else store.mean_squares()
        number = self.exchange.begin(squares)
        if not self._has_ended:
            yield from self._inform(PartialNorm(number, squares))
            self._listener.waits_for_servers = True
            while not self.exchange.is_whole(number):
                yield from self._listener.listen(())
            self._listener.waits_for_servers = False
        norm = self.exchange.take_norm(number)
        if not is_empty:
            yield Compute(lambda: store.apply(norm), "apply", num_batches=self.gathering.num_taken)
