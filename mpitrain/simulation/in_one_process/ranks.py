"""Ranks that take the same steps on the same parameters, all of them in one process: what a simulation computes.

Invariants: replicas are identical, so one module and one optimizer serve all ranks; only running statistics and random
numbers are each rank's own. Gradients are divided by the number of ranks and added in the order of ranks, as DDP has it
done. So parameters are those of the run over MPI wherever sums do not depend on their order, and there to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpitrain.job import Job
from mpitrain.model.gradient.sparse_gradients import numbers_of_gradients
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.recipe import Recipe
from mpitrain.simulation.in_one_process.codecs import CodecsInOneProcess
from mpitrain.training.synchronous.stepper import Parts, WeighsAtLast
from mpitrain.training.synchronous.unused import check_used

Around = Callable[[int, Callable[[], float]], float]  # computes the gradient of a rank
Gradient = list[torch.Tensor | None]


class RanksInOneProcess(WeighsAtLast):
    """The stepper of all ranks.

    Args:
        job, recipe: as for a `Stepper`.
        keys: of every rank's random numbers.
        codecs: of every rank's gradient, where numbers do not travel as they are.
        reports_mean: whether the loss to report is that of all ranks; by default it is the first one's.
    """

    def __init__(
        self, job: Job, recipe: Recipe, keys: Sequence[int],
        codecs: CodecsInOneProcess | None = None, reports_mean: bool = False,
    ):  # fmt: skip
        super().__init__(job, recipe, 0)
        self.owns = [recipe.gradient.begin(key) for key in keys]
        self.codecs, self.reports_mean = codecs, reports_mean
        self.touched: dict[
            int, tuple[int, int]
        ] = {}  # by parameter: rows that the ranks have sent, and different ones
        self._buffers: list[list[torch.Tensor]] = []

    def train_all(self, module: nn.Module, rates: Rates) -> None:
        """Step this module, which all ranks hold, with the optimizer of `rates`."""
        self.train(module, rates)
        self._shared = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._held = list(module.buffers())
        self._buffers = [[one.clone() for one in self._held] for _ in self.owns]
        if self.codecs is not None:
            self.codecs.attach(module, self.owns)

    def step_all_ranks(self, parts: Sequence[Parts], shares: Sequence[int], around: Around) -> float:
        """One step of all ranks, each on its own batches; returns the loss to report."""
        count, size = sum(shares), len(self.owns)
        self.weight, self.touched = None, {}
        values, everybody = [], list[Gradient]()
        sums: Gradient = []
        for rank, (one, share) in enumerate(zip(parts, shares, strict=True)):
            self._hold(rank)
            self.own_gradients = self.owns[rank]
            values.append(around(rank, lambda one=one, share=share: self.compute(one, share, count)))  # type: ignore[misc]
            self._keep(rank)
            check_used(self.job, self.module, self._shared)
            numbers_of_gradients(self._shared)  # each row once
            own = [parameter.grad for parameter in self._shared]
            if self.codecs is not None:
                everybody.append([None if one is None else one.clone() for one in own])
            else:
                sums = self.add(sums, own)
                self._count_rows(own)
        self._hold(0)
        if self.codecs is not None:
            self.codecs.reduce(self._shared, everybody)
        else:
            self._use(sums, size)
        return self._end(values, shares, count)

    def _end(self, values: list[float], shares: Sequence[int], count: int) -> float:
        first_bad = next((rank for rank, value in enumerate(values) if value - value != 0.0), 0)
        self.own_gradients, value = self.owns[first_bad], values[first_bad]
        if self.reports_mean:
            value = sum(own * (share / count) for own, share in zip(values, shares, strict=True))
        self.update(value, shares[0], count)
        return value if self.reports_mean else values[0]

    def _count_rows(self, own: Gradient) -> None:
        for index, gradient in enumerate(own):
            if gradient is not None and gradient.is_sparse:
                self.touched[index] = self.touched.get(index, (0, 0))[0] + gradient._nnz(), 0

    @torch.no_grad()
    def add(self, sums: Gradient, own: Gradient) -> Gradient:
        """The sums with one rank's gradient, divided by the number of ranks, added in float32 at least."""
        result: Gradient = []
        for total, gradient in zip(sums or [None] * len(own), own, strict=True):
            if gradient is None:
                result.append(total)
                continue
            part = gradient / len(self.owns)
            part = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            result.append(part if total is None else total.add_(part))
        return result

    @torch.no_grad()
    def _use(self, sums: Gradient, size: int) -> None:
        """The mean of the ranks becomes the gradient."""
        factor = 1.0
        if self.weight is not None:
            factor = size / self.weight if self.weight else 0.0
        for index, (parameter, total) in enumerate(zip(self._shared, sums, strict=True)):
            if total is not None and total.is_sparse:
                total = total.coalesce()
                self.touched[index] = self.touched[index][0], total._nnz()
            if total is not None and factor != 1.0:
                total.mul_(factor)
            parameter.grad = None if total is None else total.to(parameter.dtype)

    @torch.no_grad()
    def _hold(self, rank: int) -> None:
        for held, own in zip(self._held, self._buffers[rank], strict=True):
            held.copy_(own)

    @torch.no_grad()
    def _keep(self, rank: int) -> None:
        for held, own in zip(self._held, self._buffers[rank], strict=True):
            own.copy_(held)
