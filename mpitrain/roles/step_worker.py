"""A worker among those that all take the same steps, whatever family of strategies they train under.

Invariants: what is exchanged only the replica knows, and when only its strategy; all workers take the same steps, and
so come to the same all-reduces. The role is the same over MPI, in threads and in virtual time.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from mpitrain.effects import AllReduce, Compute, Effect, Now, Reduction, Role
from mpitrain.messages import num_parts
from mpitrain.roles.protocols import Report
from mpitrain.strategies.sampling.step_partition import StepTurn
from mpitrain.strategies.validation_policy import ValidationCadence


class Course(Protocol):
    """Which steps a worker takes."""

    @property
    def epoch(self) -> int:
        """Whole epochs that are over."""

    @property
    def goes_on(self) -> bool:
        """Whether steps are left, or the end of an epoch."""

    @property
    def has_step(self) -> bool:
        """Whether steps are left."""

    def next_turn(self) -> StepTurn | None:
        """The next step, or None at the end of an epoch."""


class StepReplica(Protocol):
    """A worker's model and data, opaque to the role."""

    @property
    def samples(self) -> int:
        """That all have trained on."""

    @property
    def stopped(self) -> bool:
        """Whether the run is to end: a gradient was not finite, a validation has ended it, or somebody has asked."""

    def local_step(self, turn: StepTurn) -> float:
        """Forward and backward over the turn's lease, and a step of its own where it is one; returns the loss."""

    def reduce_gradients(self) -> Reduction | None:
        """What all average before the worker steps, where the backward pass has not done it."""

    def end_step(self, turn: StepTurn) -> Reduction | None:
        """The averaging that is due after this step."""

    def statistics(self) -> dict[str, float]:
        """What there is to report in a row of progress."""

    def settle_checkpoint(self) -> None:
        """The step is over and reported: a checkpoint may be due."""

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""

    @property
    def validates_last(self) -> bool:
        """Whether a validation may come after the last step of all, too."""

    def reduce_mean(self) -> Reduction | None:
        """All come to a validation: the mean that it measures, where workers hold different parameters now."""

    @property
    def measured_part(self) -> float:
        """How much of the validation set `measure` measures, of 1."""

    def measure(self) -> None:
        """This worker's share of the validation set, on what all hold or the mean of it."""

    def gather_measured(self) -> Reduction | None:
        """What all workers have measured, for the first one, where `measure` has not done it."""

    def conclude(self) -> dict[str, float]:
        """Metrics, on the first worker."""

    def hear_figures(self, text: str) -> Reduction:
        """What the first worker has measured that a scheduler goes by, for all: its `Figures.told`."""

    def agree_to_end(self, ends: bool) -> Reduction:
        """The question to all workers whether a validation has ended the run; the replica is `stopped` then."""

    def finish(self) -> Reduction | None:
        """The last averaging, where workers hold different parameters now."""


class AlikeReplica:
    """What a `StepReplica` answers where all workers hold the same after every step: all that they average is part of
    the step, and what was measured is known at once. `_measured` gives that, of so many samples."""

    validates_last = True

    def _measured(self, samples: int | None) -> dict[str, float]:
        raise NotImplementedError

    @property
    def samples(self) -> int:
        raise NotImplementedError

    def end_step(self, turn: StepTurn) -> None:
        """Nothing is left to average."""

    def reduce_mean(self) -> Reduction | None:
        """The mean is what all hold."""
        return None

    def measure(self) -> None:
        """The whole validation set."""
        self._metrics = self._measured(self.samples)

    def gather_measured(self) -> None:
        """It has been."""

    def conclude(self) -> dict[str, float]:
        """What was measured."""
        return self._metrics

    def finish(self) -> None:
        """Nothing is left to average."""


class StepReport(Report, Protocol):
    """Where the first worker's progress goes."""

    def pause(self, seconds: float) -> None:
        """So much time went into something that is not training."""

    def until_now(self) -> None:
        """Training has gone on until now: others were waited for after this worker's last step."""


class StepWorker:
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
        replica: StepReplica,
        report: StepReport,
        part_samples: int = 0,
        validations: ValidationCadence | None = None,
    ):
        self.rank, self.course, self.replica, self.report = rank, course, replica, report
        self.part_samples, self.validations = part_samples, validations or ValidationCadence()
        self.compute_s = self.wait_s = 0.0
        self.num_steps = 0

    def run(self) -> Role:
        """Train to the end of the course; returns this worker's counts."""
        course, validations = self.course, self.validations
        validations.begin(course.epoch, self.replica.samples)
        if self._is_due:  # one that was broken off
            yield from self._validate(course.epoch + (not validations.policy.epochs))
        yield from self._agree_to_end()
        goes_on = self._goes_on
        while goes_on:
            if (turn := course.next_turn()) is not None:
                yield from self._take_step(turn)
            goes_on = self._goes_on
            if goes_on and self._is_due:
                yield from self._validate(course.epoch + (turn is not None))
                goes_on = self._goes_on
        if (last := self.replica.finish()) is not None:
            yield AllReduce(last)
            if self.rank == 0:
                self.report.until_now()
        return {
            "rank": self.rank, "role": "worker", "steps": self.num_steps,
            "compute_s": self.compute_s, "wait_s": self.wait_s,
        }  # fmt: skip

    @property
    def _is_due(self) -> bool:
        return self.validations.is_due(self.course.epoch, self.replica.samples)

    @property
    def _goes_on(self) -> bool:
        return self.course.goes_on and not self.replica.stopped

    def _take_step(self, turn: StepTurn) -> Generator[Effect, Any, None]:
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
        yield from self._reduce(replica.end_step(turn))
        self.compute_s += computed_s - began_s
        self.wait_s += (yield Now()) - computed_s
        self.num_steps = turn.step + 1
        if self.rank == 0:
            fields: dict[str, Any] = dict(replica.statistics())
            self.report.progress(replica.samples, turn.step + 1, turn.epoch + 1, loss, **fields)
        yield Compute(replica.settle_checkpoint, "checkpoint")

    def _reduce(self, reduction: Reduction | None) -> Generator[Effect, Any, None]:
        if reduction is not None:
            yield AllReduce(reduction)

    def _validate(self, epoch: int) -> Generator[Effect, Any, None]:
        """Measure together; `epoch` is the one that the first worker reports, from 1."""
        replica = self.replica
        if replica.validates and (replica.validates_last or self.course.has_step):
            yield from self._reduce(replica.reduce_mean())
            began_s = yield Now()  # until here others were training, which is no pause
            yield Compute(replica.measure, "validate", size=replica.measured_part)
            yield from self._reduce(replica.gather_measured())
            metrics: dict[str, float] = {}
            if self.rank == 0:
                metrics = yield Compute(replica.conclude, "validate", size=0.0)
                self.report.event("validation", epoch=epoch, samples=replica.samples, **metrics)
                self.report.pause((yield Now()) - began_s)
            if self.validations.informs:
                yield from self._reduce(replica.hear_figures(self.validations.told(metrics)))
        self.validations.done()
        yield from self._agree_to_end()

    def _agree_to_end(self) -> Generator[Effect, Any, None]:
        """The first worker knows whether a validation has ended the run."""
        if self.validations.may_end:
            yield from self._reduce(self.replica.agree_to_end(self.rank == 0 and self.validations.over))
