"""A worker that trains by itself and now and then takes the mean with all others, in virtual time.

Invariants: an averaging is a ring in which every worker sends 2 (N - 1) pieces of 1/N of the bytes, the least
that any algorithm sends; whoever has come round has heard of everybody, so all have handed in what they hold. What is
averaged only the replica knows, and when only its strategy. Over MPI `training/local_sgd/trainer.py` does the same with
collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

from mpitrain.effects import Compute, Effect, Kind, Message, Now, Recv, Role, Send
from mpitrain.roles.protocols import Report
from mpitrain.strategies.sampling.peer_partition import PeerPartition, Turn


class LocalReplica(Protocol):
    """A worker's model and data, opaque to the role."""

    def local_step(self, turn: Turn) -> float:
        """Forward and backward over the turn's lease, and a step of its own where it is one; returns the loss."""

    def due(self, turn: Turn) -> tuple[float, bool]:
        """Bytes that all exchange after this step, 0 for none, and whether to ask again when that is done."""

    def hand_in(self) -> None:
        """What this worker brings to the exchange that begins."""

    def take_out(self) -> None:
        """All have handed in: take over what has become of it."""

    def validates_apart(self) -> float:
        """Bytes that a validation exchanges, because workers hold different parameters now; 0 where they do not."""

    def validate(self) -> dict[str, float]:
        """Metrics of the mean of the workers."""

    def finish(self) -> float:
        """Bytes of the last averaging, 0 where all hold the same."""

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run."""

    def statistics(self) -> dict[str, float]:
        """What there is to tell in a row of progress."""


class Piece(NamedTuple):
    """Bytes on their way round the ring."""

    num_bytes: int

    def statistics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    def release(self) -> None:
        """Nothing is held."""


class LocalWorker:
    """One worker.

    Args:
        rank: its own, from 0; number: of all workers; shares: its part of the data.
        report: where progress goes, on the first worker, which also validates.
    """

    def __init__(self, rank: int, number: int, shares: PeerPartition, replica: LocalReplica, report: Report):
        self.rank, self.number, self.shares, self.replica, self.report = rank, number, shares, replica, report
        self.compute_s = self.wait_s = 0.0
        self._num_rounds = 0
        self._waiting: deque[Message] = deque()

    def run(self) -> Role:
        """Train to the end of the course; returns this worker's counts."""
        epoch = 0
        while not self.replica.stopped and (turn := self.shares.next()) is not None:
            if turn.epoch > epoch:
                yield from self._validate(epoch, turn.samples_before)
                epoch = turn.epoch
            began_s = yield Now()
            loss = yield self._compute(turn)
            computed_s = yield Now()
            self.compute_s += computed_s - began_s
            again = True
            while again:
                num_bytes, again = self.replica.due(turn)
                if num_bytes:
                    yield from self._exchange(num_bytes)
            self.wait_s += (yield Now()) - computed_s
            samples = turn.samples_before + turn.num_samples
            told = self.replica.statistics()
            self.report.progress(samples, turn.step + 1, turn.epoch + 1, loss, **dict[str, Any](told))
        if num_bytes := self.replica.finish():
            yield from self._exchange(num_bytes)
        return {
            "rank": self.rank, "role": "worker", "steps": self.shares.step,
            "compute_s": self.compute_s, "wait_s": self.wait_s,
        }  # fmt: skip

    def _compute(self, turn: Turn) -> Compute:
        return Compute(lambda: self.replica.local_step(turn), interruptible=False)

    def _exchange(self, num_bytes: float) -> Generator[Effect, Any, None]:
        """Once round the ring to add up, and once to hand out."""
        self.replica.hand_in()
        piece = Piece(-(-int(num_bytes) // self.number))
        for _ in range(2 * (self.number - 1)):
            after = (self.rank + 1) % self.number
            yield Send(after, Message(Kind.MEAN, version=self._num_rounds, payload=piece))
            yield from self._expect(self._num_rounds)
            self._num_rounds += 1
        self.replica.take_out()

    def _expect(self, version: int) -> Generator[Effect, Any, None]:
        """The neighbour's piece of this round; it may be a round ahead."""
        while not (self._waiting and self._waiting[0].version == version):
            _, message = yield Recv()
            self._waiting.append(message)
        self._waiting.popleft()

    def _validate(self, epoch: int, samples: int) -> Generator[Effect, Any, None]:
        if num_bytes := self.replica.validates_apart():
            yield from self._exchange(num_bytes)
        if self.rank == 0:
            metrics = yield Compute(self.replica.validate, "validate")
            if metrics:
                self.report.event("validation", epoch=epoch + 1, samples=samples, **metrics)
