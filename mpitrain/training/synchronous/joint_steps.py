"""Steps of a job with several optimizers, such as a GAN: its step function says what is computed, and which optimizer
steps when.

Invariants: all ranks call the step function once a step, each with its own batch. Where it steps an optimizer, the
gradients of that optimizer's parameters become the mean over the samples of all ranks, are judged, clipped and used: so
N ranks take the steps that one process takes with the batches of all of them. Nothing is exchanged in a backward pass,
so it may run through parts of the model that another optimizer trains.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.data.read.batch import Batch
from mpitrain.model.gradient.sparse_gradients import numbers_of_gradients, sparse_parameters
from mpitrain.model.gradient.step_function import StepFunction
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.wire.flat import all_finite
from mpitrain.system import trace
from mpitrain.training.synchronous.copying_trainer import CopyingTrainer
from mpitrain.training.synchronous.ddp import ParallelModule
from mpitrain.training.synchronous.stepper import Parts, Stepper


class JointSteps(Stepper):
    """A stepper whose steps are those of a job's step function, each rank by itself."""

    def train(self, module: nn.Module, rates: Rates, parallel: ParallelModule | None = None) -> None:
        super().train(module, rates, parallel)
        rule, optimizers = self.recipe.gradient, rates.optimizer
        assert rule.step is not None and isinstance(optimizers, SeveralOptimizers)
        self.turns = StepFunction(rule.step, rule.precision, optimizers, self._prepare)
        self._share = 1.0  # of the samples of the step
        self._num_prepared, self._is_refused = 0, False

    def take_step(self, parts: Parts, share: int, count: int) -> float:
        self._share, self._num_prepared, self._is_refused = share / count, 0, False
        self.optimizer.zero_grad(set_to_none=True)
        began_s, waited_s = time.monotonic(), self._waited_s
        self.before_forward()
        value = self.turns.run(self.module, self._batches(parts), share, self._seed_part)
        self.compute_s += time.monotonic() - began_s - (self._waited_s - waited_s)
        if self._is_refused:
            self.on_nonfinite(value, count)
        else:
            self.update_ema()
            self.samples += count
        self.step += 1
        return value

    def _batches(self, parts: Parts) -> Iterator[tuple[Batch, int]]:
        for batch, count in self._awaited(iter(parts)):
            assert batch is not None
            yield batch, count

    def _seed_part(self, part: int) -> None:
        self._part = part
        self.seed()

    def _prepare(self, parameters: list[nn.Parameter]) -> bool:
        if not self._num_prepared:
            self.before_update()
            self.follow_schedule()
        self._num_prepared += 1
        if self._is_refused and self.recipe.update.on_nonfinite == "stop":
            return False
        self.average(parameters)
        gradients = numbers_of_gradients(parameters)
        finite = all_finite(gradients)
        if finite:
            self.updates.shape(lambda: gradients)
        self._is_refused = self._is_refused or not finite
        return finite

    def average(self, parameters: list[nn.Parameter]) -> None:
        """Make their gradients those of all ranks, where all step together."""

    def named_losses(self) -> dict[str, float]:
        """What a row of progress says of them."""
        return {f"loss_{name}": value for name, value in self.turns.losses.items()}


class JointStepper(JointSteps):
    """The same with the mean gradient of all ranks."""

    def train(self, module: nn.Module, rates: Rates, parallel: ParallelModule | None = None) -> None:
        super().train(module, rates, parallel)
        self._sparse = sparse_parameters(module)

    def average(self, parameters: list[nn.Parameter]) -> None:
        began_s = time.monotonic()
        if dist.get_world_size() > 1:
            with trace.span("mean gradient", trace.COMMUNICATION):
                mean_gradients(parameters, self._share, self._sparse)
        self._waited_s += time.monotonic() - began_s


@torch.no_grad()
def mean_gradients(
    parameters: list[nn.Parameter], share: float, sparse: Container[int] = frozenset()
) -> None:
    """The sum over all ranks of `share` times their gradients, in place of each; a parameter that has one on no rank
    keeps none. `sparse`: the `id` of those whose gradients are rows. Collective."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        some = [parameter for parameter in parameters if parameter.dtype == dtype]
        there = torch.tensor([one.grad is not None for one in some], dtype=dtype, device=some[0].device)
        pieces = [_of(one).reshape(-1) * share for one in some if id(one) not in sparse]
        flat = torch.cat([*pieces, there])
        dist.all_reduce(flat)
        *sums, there = flat.split([one.numel() for one in pieces] + [len(some)])
        summed = iter(sums)
        for parameter, ranks in zip(some, there.tolist(), strict=True):
            if id(parameter) not in sparse:
                total = next(summed).view_as(parameter)
            elif ranks:
                total = _rows_of(parameter) * share
                dist.all_reduce(total)
            parameter.grad = total if ranks else None


def _rows_of(parameter: nn.Parameter) -> torch.Tensor:
    gradient = _of(parameter)
    return gradient if gradient.is_sparse else gradient.to_sparse(1)


def _of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class JointTrainer(CopyingTrainer):
    """The run of one rank. A step that was broken off may have stepped some of the optimizers."""

    def _make_stepper(self) -> JointStepper:
        session = self.session
        stepper = JointStepper(session.job, self.recipe, self.rank, session.runtime.where)
        stepper.train(self.module, self.rates)
        return stepper

    def statistics(self) -> dict[str, float]:
        assert isinstance(self.stepper, JointStepper)
        return self.stepper.named_losses()
