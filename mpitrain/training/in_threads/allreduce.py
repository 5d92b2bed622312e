"""`allreduce()` between threads: the synchronous run, its gradients added up by the threads themselves.

Invariants: gradients are divided by the number of ranks and added in the order of ranks, after the whole backward pass,
so the parameters are those of the run over MPI wherever sums do not depend on their order, and there to the bit. No
rank waits for another one inside a forward or backward pass: then replicas that draw random numbers compute in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.effects import Exchange, together
from mpitrain.job import Job
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.recipe import Recipe
from mpitrain.threads.ranks import ThreadRanks
from mpitrain.threads.sums import Sums
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.session import Session
from mpitrain.training.synchronous.ddp import ParallelModule
from mpitrain.training.synchronous.launch import run_synchronous
from mpitrain.training.synchronous.stepper import Parts, Stepper, WeighsAtLast
from mpitrain.training.synchronous.trainer import Trainer
from mpitrain.training.synchronous.unused import check_used


def run_allreduce(session: Session) -> RunOutcome:
    """Train synchronously; returns what this rank knows of the run."""
    return run_synchronous(session, ThreadTrainer)


class ThreadStepper(WeighsAtLast):
    """The stepper of one of the threads.

    Args:
        job, recipe, random_key, where: as for a `Stepper`.
        sums: of all ranks.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        random_key: int,
        where: Callable[[], str],
        sums: Sums,
    ):
        super().__init__(job, recipe, random_key, where)
        self.sums = sums

    def train(self, module: nn.Module, rates: Rates, parallel: ParallelModule | None = None) -> None:
        super().train(module, rates, parallel)
        self._shared = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def take_step(self, parts: Parts, share: int, count: int) -> float:
        """The first half of it, while the world may hold the lock of random numbers; `reduce_gradients` the second."""
        self.weight = None
        value = self.compute(parts, share, count)
        self._computed = value, share, count
        return value

    def reduce_gradients(self) -> Exchange:
        return together(self._use_mean)

    def _use_mean(self) -> None:
        check_used(self.job, self.module, self._shared)
        self._reduce()
        self.update(*self._computed)

    @torch.no_grad()
    def _reduce(self) -> None:
        """The mean of all ranks becomes the gradient."""
        kinds = [None if one.grad is None else one.grad.is_sparse for one in self._shared]
        everybody = self.sums.bring((kinds, self.weight))
        weights = [weight for _, weight in everybody if weight is not None]
        factor = 1.0
        if weights:
            factor = self.sums.size / sum(weights) if sum(weights) else 0.0
        dense: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter, of_ranks in zip(self._shared, zip(*(kinds for kinds, _ in everybody)), strict=True):
            if True in of_ranks:
                self._reduce_rows(parameter, factor)
            elif False in of_ranks:
                dense.setdefault(parameter.dtype, []).append(parameter)
        for parameters in dense.values():
            pieces = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
            flat = torch.cat([piece.reshape(-1) for piece in pieces]).div_(self.sums.size)
            total = self.sums.add_up(flat)
            if factor != 1.0:
                total.mul_(factor)
            split = total.to(flat.dtype).split([one.numel() for one in parameters])
            for parameter, piece in zip(parameters, split, strict=True):
                parameter.grad = piece.view_as(parameter)

    def _reduce_rows(self, parameter: nn.Parameter, factor: float) -> None:
        """The same of a gradient that has touched rows only."""
        own = parameter.grad
        everybody = self.sums.bring(None if own is None else own.coalesce() / self.sums.size)
        total: Any = None
        for one in everybody:
            if one is not None:
                total = one.clone() if total is None else total + one
        total = total.coalesce()
        parameter.grad = total if factor == 1.0 else total * factor
        self.sums.bring(None)  # all have read what was brought


class ThreadTrainer(Trainer):
    """The run of one of the threads."""

    def _make_stepper(self) -> Stepper:
        session, ranks = self.session, self.session.runtime
        assert isinstance(ranks, ThreadRanks)
        stepper = ThreadStepper(session.job, self.recipe, self.rank, ranks.where, ranks.sums())
        stepper.train(self.module, self.rates)
        return stepper
