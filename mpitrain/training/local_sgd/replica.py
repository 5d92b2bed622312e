"""One worker under local SGD: its steps between two averagings, and what it brings to an averaging.

Invariants: the same code runs over MPI and in virtual time; only what answers its questions (`Ask`) differs. Between
two averagings no byte travels. A gradient that is not finite moves nothing here; the other workers learn of it
at the next averaging, and a run that is to stop then stops everywhere.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from mpitrain.effects import Exchange
from mpitrain.job import Job
from mpitrain.messages import Lease
from mpitrain.model.recipe import Recipe
from mpitrain.strategies.sampling.step_partition import StepTurn
from mpitrain.training.local_sgd.averager import Ask, Asking, Averager
from mpitrain.training.synchronous.stepper import Parts, Stepper
from mpitrain.training.validations.validation import Measure, Part, holding


class LocalReplica(Stepper):
    """The stepper of a worker, with what its role asks for.

    Args:
        averager: of the workers' parameters.
        fetch: the batches of a lease.
        job, recipe, rank, where: as for a `Stepper`.
        measure: of the module.

    Attributes:
        ended: a validation has ended the run; ended_apart: its end came between two averagings.
        local_nonfinite: steps that this worker has left out, as far as the others know of them.
        on_settled: called after every step.
    """

    def __init__(
        self,
        averager: Averager,
        fetch: Callable[[Lease], Parts],
        job: Job,
        recipe: Recipe,
        rank: int,
        where: Callable[[], str] | None = None,
        measure: Measure | None = None,
    ):
        super().__init__(job, recipe, rank, where)
        self.averager, self.fetch, self.set_measure = averager, fetch, measure
        self.on_settled: Callable[[], object] = _nothing
        self.local_nonfinite = self._skipped = 0
        self.ended, self.ended_apart, self._refused = False, False, ""
        self._computed: tuple[float, int, int] | None = None  # a gradient that is not used yet
        self._mean: list[torch.Tensor] = []
        self._observed: Part = []

    validates_last = False  # but the last averaging, which ends the run

    @property
    def place(self) -> tuple[int, int]:
        """This worker's number, and how many there are."""
        return self.own_gradients.worker, self.num_replicas

    # ---- what the role asks for

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run, or a validation has."""
        return bool(self.failure) or self.ended

    def local_step(self, turn: StepTurn) -> float:
        """Forward and backward over the turn's lease, and the optimizer's step unless gradients are yet to be averaged;
        returns the loss."""
        lease = turn.lease
        value = self.compute(self.fetch(lease), lease.num_samples, turn.num_samples)
        self._computed = value, lease.num_samples, turn.num_samples
        if not self.averages_gradients or self.parallel is not None:
            self._move()
        return value

    def reduce_gradients(self) -> Exchange | None:
        """What all average before the worker steps, where DDP has not done it in the backward pass."""
        if self._computed is None:
            return None
        return Exchange(self._average_gradients, self._parameter_bytes)

    def end_step(self, turn: StepTurn) -> Exchange | None:
        """The averaging that is due after this step."""
        due = self.averager.end_step(turn.num_samples)
        return Exchange(self._average, self.averager.num_bytes) if due else None

    def settle_checkpoint(self) -> None:
        """The step is over and reported."""
        self.on_settled()

    def finish(self) -> Exchange | None:
        """The last averaging, where workers hold different parameters now."""
        self.ended_apart = self.averager.is_apart
        return Exchange(self._average, self.averager.num_bytes) if self.ended_apart else None

    def reduce_mean(self) -> Exchange | None:
        """The mean that a validation measures, where workers hold different parameters now, and the first worker's
        running statistics."""
        if not self.averager.is_apart and (self.place[1] == 1 or not self._buffers()):
            return None
        return Exchange(self._take_mean, self._mean_bytes)

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.set_measure is not None

    @property
    def measured_part(self) -> float:
        """How much of the validation set `measure` measures, of 1."""
        return self.set_measure.part_of(*self.place) if self.set_measure is not None else 0.0

    def measure(self) -> None:
        """This worker's share of the validation set, on the mean of the workers; its own parameters stay as they
        are."""
        assert self.set_measure is not None
        with self._holding_mean():
            self._observed = self.set_measure.share(*self.place, self.averaged())

    def gather_measured(self) -> Exchange:
        """What all workers have measured, for the first one."""
        return Exchange(self._gather, _no_bytes)

    def conclude(self, chosen: bool = True) -> dict[str, float]:
        """Metrics of the mean of the workers, on the first one; `chosen`: they count for the choice of the best."""
        assert self.set_measure is not None
        with self._holding_mean():
            found = self.set_measure.conclude(
                self._observed, self.samples if chosen else None, self.averaged()
            )
        self._observed, self._mean = [], []
        return found

    def _holding_mean(self) -> AbstractContextManager[None]:
        held = [*self.averager.parameters, *self._buffers()]
        return holding(held, self._mean) if self._mean else contextlib.nullcontext()

    def _buffers(self) -> list[torch.Tensor]:
        """BatchNorm's and the like."""
        return list(self.module.buffers())

    def hear_figures(self, text: str) -> Exchange:
        """What the first worker has measured that a scheduler goes by, for all."""
        return Exchange(lambda: self._hear(text), _no_bytes)

    def agree_to_end(self, ends: bool) -> Exchange:
        """The question to all workers whether a validation has ended the run."""
        return Exchange(lambda: self._agree_to_end(ends), _no_bytes)

    def begin_anew(self) -> None:
        super().begin_anew()
        self._skipped, self._refused, self._computed = 0, "", None

    def statistics(self) -> dict[str, float]:
        """What there is to report in a row of progress."""
        return self.averager.statistics()

    # ---- questions to all workers

    @torch.no_grad()
    def _average(self) -> Asking:
        """Report to the others what went wrong since the last averaging, and take the mean of what all hold."""
        rows = yield Ask(numbers=(self._skipped, int(bool(self._refused))))
        self.nonfinite += int(rows[:, 0].sum())
        self.local_nonfinite, self._skipped = self.local_nonfinite + self._skipped, 0
        if rows[:, 1].any():
            other = f"step {self.step - 1}: another worker's gradient is not finite"
            self.failure = self._refused or other
        yield from self.averager.rounds()
        super().update_ema()

    def _hear(self, text: str) -> Asking:
        figures = self.updates.pace.figures
        assert figures is not None, "or nobody asks"
        [own] = json.loads(text)
        [values] = yield Ask([torch.tensor(own, dtype=torch.float64)], first=True)
        figures.take_rows([values.tolist()])

    def _agree_to_end(self, ends: bool) -> Asking:
        rows = yield Ask(numbers=(int(ends),))
        self.ended = bool(rows.any())

    @torch.no_grad()
    def _average_gradients(self) -> Asking:
        gradients = []
        for parameter in self.averager.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        torch._foreach_copy_(gradients, (yield Ask(gradients, full=True, counted=False)))
        self._move()

    @torch.no_grad()
    def _take_mean(self) -> Asking:
        parameters, buffers = self.averager.parameters, self._buffers()
        if self.averager.is_apart:
            mean = yield Ask(parameters, full=True)
        else:
            mean = [parameter.detach().clone() for parameter in parameters]
        firsts = (yield Ask(buffers, first=True)) if buffers else []
        self._mean = mean + firsts

    def _gather(self) -> Asking:
        self._observed = yield Ask(part=self._observed)
        if self.place[0] > 0:  # only the first one has still to conclude
            self._mean = []

    def _mean_bytes(self) -> float:
        buffers = sum(one.numel() * one.element_size() for one in self._buffers())
        return buffers + (self._parameter_bytes() if self.averager.is_apart else 0.0)

    def _parameter_bytes(self) -> float:
        return float(sum(one.numel() * one.element_size() for one in self.averager.parameters))

    # ---- hooks of the step

    @property
    def averages_gradients(self) -> bool:
        return self.averager.averages_gradients

    def backward(self, parts: Parts, share: int, weight: float) -> float:
        self.averager.begin_step()
        return super().backward(parts, share, weight)

    def exchange(self, whether: bool) -> None:
        super().exchange(whether and self.averages_gradients)

    @property
    def holds(self) -> int:
        return 0 if self.averages_gradients else self.place[0]

    @property
    def weighs_sums(self) -> bool:
        return (
            self.averages_gradients and self.parallel is not None
        )  # or nobody else is asked in a backward pass

    def update_ema(self) -> None:
        if self.averages_gradients:  # or else at the next averaging
            super().update_ema()

    def on_nonfinite(self, value: float, count: int) -> None:
        if self.averages_gradients:
            super().on_nonfinite(value, count)
            return
        self.samples += count
        self._skipped += 1
        if self.recipe.update.on_nonfinite == "stop":
            what = f"loss is {value:g}" if value - value != 0.0 else "the gradient is not finite"
            self._refused = self._refused or f"{self.where()}: {what}"

    def _move(self) -> None:
        """The gradients are those to step with."""
        assert self._computed is not None
        self.update(*self._computed)
        self._computed = None


def _no_bytes() -> float:
    """A flag weighs nothing beside parameters."""
    return 0.0


def _nothing() -> None:
    """Nobody waits for the end of a step."""
