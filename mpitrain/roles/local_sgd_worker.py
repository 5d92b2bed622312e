"""A worker under local SGD: it trains by itself, and now and then takes the mean with all others.

Invariants: what is reduced only the replica knows, and when only its strategy; all workers take the same steps, and so
come to the same all-reduces. The role is the same over MPI and in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from mpitrain.effects import AllReduce, Compute, Effect, Now, Reduction, Role
from mpitrain.messages import num_parts
from mpitrain.roles.protocols import Report
from mpitrain.strategies.sampling.peer_partition import Turn
from mpitrain.strategies.validation_policy import ValidationCadence


class Course(Protocol):
    """Which steps a worker takes."""

    epoch: int

    def next(self) -> Turn | None:
        """The next step, or None at the end."""


class LocalReplica(Protocol):
    """A worker's model and data, opaque to the role."""

    samples: int

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""

    def local_step(self, turn: Turn) -> float:
        """Forward and backward over the turn's lease, and a step of its own where it is one; returns the loss."""

    def reduce_gradients(self) -> Reduction | None:
        """What all average before the worker steps, where the backward pass has not done it."""

    def end_step(self) -> Reduction | None:
        """The averaging that is due after this step."""

    def settle(self) -> None:
        """The step is over and reported."""

    def reduce_mean(self) -> Reduction | None:
        """The mean that a validation measures, where workers hold different parameters now."""

    @property
    def measured_part(self) -> float:
        """How much of the validation set `measure` measures, of 1."""

    def measure(self) -> None:
        """This worker's share of the validation set, on the mean of the workers."""

    def gather_measured(self) -> Reduction:
        """What all workers have measured, for the first one."""

    def conclude(self) -> dict[str, float]:
        """Metrics of the mean of the workers, on the first one."""

    def agree_to_end(self, ends: bool) -> Reduction:
        """The question to all workers whether a validation has ended the run; the replica is `stopped` then."""

    def finish(self) -> Reduction | None:
        """The last averaging, where workers hold different parameters now."""

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run, or a validation has."""

    def statistics(self) -> dict[str, float]:
        """What there is to report in a row of progress."""


class LocalReport(Report, Protocol):
    """Where the first worker's progress goes."""

    def pause(self, seconds: float) -> None:
        """So much time went into something that is not training."""

    def until_now(self) -> None:
        """Training has gone on until now: others were waited for after this worker's last step."""


class LocalSGDWorker:
    """One worker.

    Args:
        rank: its own, from 0; the first worker reports and validates.
        course: its part of the data; replica: its model; report: where progress goes.
        part_samples: as for a `Worker`.
        validations: when all come together to validate, and whether that ends the run; every epoch by default.
    """

    def __init__(
        self,
        rank: int,
        course: Course,
        replica: LocalReplica,
        report: LocalReport,
        part_samples: int = 0,
        validations: ValidationCadence | None = None,
    ):
        self.rank, self.course, self.replica, self.report = rank, course, replica, report
        self.part_samples, self.validations = part_samples, validations or ValidationCadence()
        self.compute_s = self.wait_s = 0.0
        self.num_steps = 0

    def run(self) -> Role:
        """Train to the end of the course; returns this worker's counts."""
        epoch, replica = self.course.epoch, self.replica
        self.validations.begin(epoch, replica.samples)
        yield from self._agree_to_end()
        while not replica.stopped and (turn := self.course.next()) is not None:
            if self.validations.is_due(turn.epoch, replica.samples):
                yield from self._validate(epoch)
                self.validations.done()
                if replica.stopped:
                    break
            epoch = turn.epoch
            yield from self._step(turn)
        yield from self._reduce(replica.finish())
        if self.rank == 0:
            self.report.until_now()
        return {
            "rank": self.rank, "role": "worker", "steps": self.num_steps,
            "compute_s": self.compute_s, "wait_s": self.wait_s,
        }  # fmt: skip

    def _step(self, turn: Turn) -> Generator[Effect, Any, None]:
        replica = self.replica
        began_s = yield Now()
        loss = yield Compute(
            lambda: replica.local_step(turn),
            interruptible=False,
            num_batches=num_parts(turn.lease, self.part_samples),
            step=turn.step,
        )
        computed_s = yield Now()
        yield from self._reduce(replica.reduce_gradients())
        yield from self._reduce(replica.end_step())
        self.compute_s += computed_s - began_s
        self.wait_s += (yield Now()) - computed_s
        self.num_steps = turn.step + 1
        if self.rank == 0:
            fields: dict[str, Any] = dict(replica.statistics())
            self.report.progress(replica.samples, turn.step + 1, turn.epoch + 1, loss, **fields)
        yield Compute(replica.settle, "checkpoint")

    def _reduce(self, reduction: Reduction | None) -> Generator[Effect, Any, None]:
        if reduction is not None:
            yield AllReduce(reduction)

    def _validate(self, epoch: int) -> Generator[Effect, Any, None]:
        """Each worker measures the mean of all on its share of the validation set; the first one reports."""
        if not self.replica.validates:
            return
        yield from self._reduce(self.replica.reduce_mean())
        began_s = yield Now()  # until here others were training, which is no pause
        yield Compute(self.replica.measure, "validate", size=self.replica.measured_part)
        yield from self._reduce(self.replica.gather_measured())
        if self.rank == 0:
            metrics = yield Compute(self.replica.conclude, "validate", size=0.0)
            self.report.event("validation", epoch=epoch + 1, samples=self.replica.samples, **metrics)
            self.report.pause((yield Now()) - began_s)
        yield from self._agree_to_end()

    def _agree_to_end(self) -> Generator[Effect, Any, None]:
        """The first worker knows whether a validation has ended the run."""
        if self.validations.may_end:
            yield from self._reduce(self.replica.agree_to_end(self.rank == 0 and self.validations.over))
