"""The worker: reads the model from every shard, computes a gradient, pushes each shard its slice, and goes on
when all have answered.

Law of this file: a worker knows versions, leases and who has answered; what a gradient is, only its replica
knows.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

from mpitrain.effects import Compute, Effect, Interrupted, Kind, Message, Now, Payload, Recv, Role, Send
from mpitrain.roles.server import Report
from mpitrain.rules import Lease, Roles


class Gradient(Protocol):
    """What one batch gave."""

    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def finite(self) -> bool: ...
    @property
    def payloads(self) -> list[Any]: ...  # one Payload a shard, in shard order


class Replica(Protocol):
    """The worker's copy of the model with its data, opaque to the role."""

    def load(self, shard: int, payload: Payload) -> None:
        """Take over the parameters of one shard; the replica releases the payload."""

    def prefetch(self, lease: Lease) -> None:
        """This lease will be computed on soon."""

    def gradient(self, lease: Any, step: int) -> Gradient | None:
        """Forward and backward; None ends the work (only where the caller brings the data)."""

    def validate(self) -> dict[str, float]:
        """Metrics of the present parameters; empty when there is nothing to validate."""


class Worker:
    """One worker.

    Args:
        rank: its own rank; roles: everybody's.
        replica: model and data.
        report: where progress goes when this rank logs.
        leased: batches come from the dealer; otherwise from whoever answers `Compute`, until it answers None.
        wants_final: fetch the final model at the end, as the validator must.
    """

    def __init__(
        self,
        rank: int,
        roles: Roles,
        replica: Replica,
        report: Report,
        leased: bool = True,
        wants_final: bool = False,
    ):
        self.rank, self.roles, self.replica, self.report = rank, roles, replica, report
        self.leased, self.wants_final = leased, wants_final
        self.leases: deque[Lease] = deque()
        self.versions = [0] * len(roles.servers)
        self.step = self.samples = self.progress = 0
        self.stopped = False
        self.compute_s = self.wait_s = 0.0

    def run(self) -> Role:
        """Work until no lease is left or a server says stop; returns this worker's counts."""
        yield from self._tell_all(Kind.JOIN)
        yield from self._collect(Kind.REPLY)
        epoch = 0
        while not self.stopped and (self.leases or not self.leased):
            lease = self.leases.popleft() if self.leased else None
            if lease and lease.epoch > epoch:
                yield from self._validate(epoch)
                epoch = lease.epoch
            if not (yield from self._one_batch(lease, epoch)):
                break
        yield from self._tell_all(Kind.DONE, stop=self.wants_final)
        if self.wants_final:
            yield from self._collect(Kind.FINAL)
        return {
            "rank": self.rank,
            "steps": self.step,
            "samples": self.samples,
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
        }

    def state(self) -> dict[str, Any]:
        """The worker's own counts, JSON-able: its step keys the randomness of its next batch."""
        return {"step": self.step, "samples": self.samples}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; parameters and leases come from the servers."""
        self.step, self.samples = state["step"], state["samples"]

    def _one_batch(self, lease: Lease | None, epoch: int) -> Generator[Effect, Any, bool]:
        started_s = yield Now()
        gradient = yield Compute(lambda: self.replica.gradient(lease, self.step), "gradient")
        if gradient is None:
            return False
        if isinstance(
            gradient, Interrupted
        ):  # by the server's answer: the same batch again, on the new version
            assert lease is not None
            self.leases.appendleft(lease)
            yield from self._collect(Kind.REPLY)
            return True
        pushed_s = yield Now()
        for shard, server in enumerate(self.roles.servers):
            message = Message(
                Kind.PUSH,
                version=self.versions[shard],
                step=self.step,
                samples=gradient.samples,
                loss=gradient.loss,
                finite=gradient.finite,
                payload=gradient.payloads[shard],
            )
            yield Send(server, message)
        self.step, self.samples = self.step + 1, self.samples + gradient.samples
        yield from self._collect(Kind.REPLY)
        self.compute_s, self.wait_s = (
            self.compute_s + pushed_s - started_s,
            self.wait_s + (yield Now()) - pushed_s,
        )
        self.report.progress(self.progress, self.versions[0], epoch + 1, gradient.loss)
        return True

    def _collect(self, kind: Kind) -> Generator[Effect, Any, None]:
        """Wait until every shard has answered. A restart that crossed this worker's last message is no answer: a
        reply names the push that it answers by the next one's step."""
        missing = set(self.roles.servers)
        while missing:
            source, message = yield Recv()
            crossed = message.kind == Kind.REPLY and (kind != Kind.REPLY or message.step < self.step)
            assert (message.kind == kind or crossed) and source in missing, (
                f"rank {source} sent {message.kind!r} out of turn"
            )
            if not crossed:
                missing.discard(source)
            shard = self.roles.servers.index(source)
            self.versions[shard] = message.version
            self.stopped = self.stopped or message.stop
            if source == self.roles.dealer:
                self.progress = message.samples
            for lease in map(Lease._make, message.leases):
                self.leases.append(lease)
                self.replica.prefetch(lease)
            assert message.payload is not None, f"rank {source} answered without parameters"
            self.replica.load(shard, message.payload)

    def _tell_all(self, kind: Kind, stop: bool = False) -> Generator[Effect, Any, None]:
        for server in self.roles.servers:
            yield Send(server, Message(kind, step=self.step, stop=stop))

    def _validate(self, epoch: int) -> Generator[Effect, Any, None]:
        """The validator measures the parameters it holds when the first batch of the next epoch reaches
        it.
        """
        if self.rank != self.roles.validator:
            return
        metrics = yield Compute(self.replica.validate, "validate")
        if metrics:
            note = {"name": "validation", "epoch": epoch + 1, "samples": self.progress, **metrics}
            self.report.event(**note)
            yield Send(self.roles.dealer, Message(Kind.NOTE, text=json.dumps(note)))
