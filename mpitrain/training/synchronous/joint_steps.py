"""Steps of a job with several optimizers, such as a GAN: its step function says what is computed, and which optimizer
steps when.

Invariants: all ranks call the step function once a step, each with its own batch. Where it steps an optimizer, the
gradients of that optimizer's parameters become the mean over the samples of all ranks, are judged, clipped and used: so
N ranks take the steps that one process takes with the batches of all of them. Nothing is exchanged in a backward pass,
so it may run through parts of the model that another optimizer trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mpitrain.data.read.batch_mistakes import explaining
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss_pass import naming_itself
from mpitrain.model.gradient.sparse_gradients import numbers_of_gradients, sparse_parameters
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.wire.flat import all_finite
from mpitrain.system import trace
from mpitrain.training.synchronous.ddp import ParallelModule
from mpitrain.training.synchronous.stepper import Parts, Stepper
from mpitrain.training.synchronous.trainer import CopyingTrainer


class NamedOptimizer:
    """An optimizer as the step function sees it: its own but for `step`.

    Args:
        prepare: makes its gradients those of all ranks; returns whether it is to step with them.
    """

    def __init__(self, optimizer: Optimizer, prepare: Callable[[list[nn.Parameter]], bool]):
        self.optimizer, self._prepare = optimizer, prepare

    def step(self) -> None:
        """One step with the mean gradient of all ranks."""
        groups = self.optimizer.param_groups
        if self._prepare([one for group in groups for one in group["params"] if one.requires_grad]):
            with trace.span("optimizer", trace.OPTIMIZER):
                self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class JointStepper(Stepper):
    """The stepper of such a job.

    Attributes:
        losses: by name, where the step function returns several.
    """

    def train(self, module: nn.Module, rates: Rates, parallel: ParallelModule | None = None) -> None:
        super().train(module, rates, parallel)
        assert isinstance(rates.optimizer, SeveralOptimizers)
        self.optimizers = {
            name: NamedOptimizer(one, self._prepare) for name, one in rates.optimizer.optimizers.items()
        }
        self.losses: dict[str, float] = {}
        self._sparse = sparse_parameters(module)
        self._share = 1.0  # of the samples of the step
        self._num_prepared, self._refused = 0, False

    def take_step(self, parts: Parts, share: int, count: int) -> float:
        assert self.job.step is not None
        ((batch, _),) = self._awaited(iter(parts))
        assert batch is not None
        self._part, self._share = 0, share / count
        self._num_prepared, self._refused = 0, False
        self.seed()
        self.optimizer.zero_grad(set_to_none=True)
        began_s, waited_s = time.monotonic(), self._waited_s
        self.before_forward()
        self.module.train()
        with (
            trace.span("step function", trace.COMPUTE),
            naming_itself(self.module),
            explaining("Job: step", batch, UsageError),
        ):
            value, self.losses = _read_losses(self.job.step(self.module, self.optimizers, batch))
        if not self._num_prepared:
            raise UsageError(
                "Job: the step function has stepped none of its optimizers; call optimizers[name].step() after the "
                "backward pass"
            )
        self.compute_s += time.monotonic() - began_s - (self._waited_s - waited_s)
        if self._refused:
            self.on_nonfinite(value, count)
        else:
            self.update_ema()
            self.samples += count
        self.step += 1
        return value

    def _prepare(self, parameters: list[nn.Parameter]) -> bool:
        if not self._num_prepared:
            self.before_update()
            self.follow_schedule()
        self._num_prepared += 1
        if self._refused and self.recipe.update.on_nonfinite == "stop":
            return False
        began_s = time.monotonic()
        if dist.get_world_size() > 1:
            with trace.span("mean gradient", trace.COMMUNICATION):
                mean_gradients(parameters, self._share, self._sparse)
        self._waited_s += time.monotonic() - began_s
        gradients = numbers_of_gradients(parameters)
        finite = all_finite(gradients)
        if finite:
            self.updates.shape(lambda: gradients)
        self._refused = self._refused or not finite
        return finite


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


def _read_losses(returned: object) -> tuple[float, dict[str, float]]:
    """The loss to report, of several their sum, and those by name."""
    named: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {"": returned}
    losses = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            raise UsageError(
                "Job: the step function must return the loss to report, one number, or losses by name, got "
                f"{type(value).__name__}{f' for {name!r}' if name else ''}"
            )
        losses[name] = float(value)
    return sum(losses.values()), {name: value for name, value in losses.items() if name}


class JointTrainer(CopyingTrainer):
    """The run of one rank. A step that was broken off may have stepped some of the optimizers."""

    def _make_stepper(self) -> JointStepper:
        session = self.session
        stepper = JointStepper(session.job, self.recipe, self.rank, session.runtime.where)
        stepper.train(self.module, self.rates)
        return stepper

    def statistics(self) -> dict[str, float]:
        assert isinstance(self.stepper, JointStepper)
        return {f"loss_{name}": value for name, value in self.stepper.losses.items()}
