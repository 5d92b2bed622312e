"""Workers under periodic averaging, all of them in one process: what a simulation computes.

Invariants: every worker has a module and an optimizer of its own and steps as `training/local_sgd/trainer.py` does;
at an exchange nobody's state is touched before everybody has handed in, and then everybody's at once, in rank order. So
parameters are those of the run over MPI wherever sums do not depend on their order, and there to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.job import Job
from mpitrain.model.optimizer import Rates
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.sampling.peer_partition import Turn
from mpitrain.training.local_sgd.averager import Ask, Averager
from mpitrain.training.local_sgd.means import MeansTogether
from mpitrain.training.local_sgd.replica import LocalReplica
from mpitrain.training.measure import build_optimizer

GRADIENTS, PARAMETERS, VALIDATION = "gradients", "parameters", "validation"


class VirtualReplica(LocalReplica):
    """One worker.

    Args:
        job, lr: the job's optimizer, loss and schedule, and a rate in place of its own.
        module: this worker's alone; strategy: when to average; table: where all meet.
        fetch: `fetch(epoch, start, count) -> batch`; epoch_samples: in an epoch.
    """

    def __init__(
        self,
        job: Job,
        lr: float | None,
        module: nn.Module,
        strategy: LocalSGD,
        table: Table,
        rank: int,
        fetch: Callable[[int, int, int], dict[str, torch.Tensor]],
        epoch_samples: int,
    ):
        optimizer = build_optimizer(job, module, lr)
        averager = Averager(module, optimizer, strategy, means=table.means.shares[rank])
        super().__init__(averager, job, table.number, epoch_samples, rank, self._where)
        self.train(module, Rates(optimizer))
        self.rank, self.table, self.fetch = rank, table, fetch
        self._mode, self._num_exchanges = PARAMETERS, 0
        self._computed: tuple[float, int, int] | None = None  # a gradient that is not used yet
        self._count = 0

    def _where(self) -> str:
        return f"rank {self.rank} (worker, step {self.step})"

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run."""
        return bool(self.failure)

    def local_step(self, turn: Turn) -> float:
        """Forward and backward over the turn's lease, and the optimizer's step where gradients are not averaged."""
        lease = turn.lease
        assert lease is not None
        batch = self.fetch(lease.epoch, lease.start, lease.num_samples)
        value = self.compute(batch, lease.num_samples, turn.num_samples)
        self._computed, self._count = (value, lease.num_samples, turn.num_samples), turn.num_samples
        if not self.averages_gradients:
            self.move()
        return value

    def move(self) -> None:
        """The gradients are those to step with."""
        assert self._computed is not None
        self.update(*self._computed)
        self._computed = None

    def due(self, turn: Turn) -> tuple[float, bool]:
        """Bytes of the exchange that this step calls for: of gradients, and then, where it is time, of parameters."""
        if self._computed is not None:
            self._mode = GRADIENTS
            return float(sum(p.numel() * p.element_size() for p in self.averager.parameters)), True
        self._mode = PARAMETERS
        return (self.averager.num_bytes() if self.averager.end_step(self._count) else 0.0), False

    def finish(self) -> float:
        """Bytes of the last averaging, 0 where all hold the same."""
        self._mode = PARAMETERS
        return self.averager.num_bytes() if self.averager.is_apart else 0.0

    def validates_apart(self) -> float:
        """Bytes of the mean that a validation measures, where workers hold different parameters now."""
        if self.job.validate is None or not self.averager.is_apart:
            return 0.0
        self._mode = VALIDATION
        return float(sum(p.numel() * p.element_size() for p in self.averager.parameters))

    def hand_in(self) -> None:
        """This worker has come to the exchange."""
        self._num_exchanges += 1
        self.table.arrive(self._num_exchanges)

    def take_out(self) -> None:
        """All have: the first to know carries it out for all."""
        self.table.carry_out(self._num_exchanges, self._mode)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Metrics of the mean of the workers."""
        if self.table.measure is None:
            return {}
        if not self.averager.is_apart:
            return self.table.measure()
        own = [parameter.detach().clone() for parameter in self.averager.parameters]
        torch._foreach_copy_(self.averager.parameters, self.table.mean)
        metrics = self.table.measure()
        torch._foreach_copy_(self.averager.parameters, own)
        return metrics

    def statistics(self) -> dict[str, float]:
        """What there is to tell in a row of progress."""
        return self.averager.statistics()


class Table:
    """Where the workers' exchanges are carried out.

    Args:
        strategy: of the run; number: of workers.
    """

    def __init__(self, strategy: LocalSGD, number: int):
        self.number = number
        self.means = MeansTogether(strategy.wire, number)
        self._reducer = MeansTogether("full", number)  # of gradients: no averaging, and not counted as one
        self.replicas: list[VirtualReplica] = []
        self.measure: Callable[[], dict[str, float]] | None = None
        self.mean: list[torch.Tensor] = []  # what a validation measures
        self._num_arrived: dict[int, int] = {}
        self._num_done = 0

    def seat(self, replicas: list[VirtualReplica]) -> None:
        """These are all the workers."""
        self.replicas = replicas

    def arrive(self, exchange: int) -> None:
        """One worker more has handed in for this exchange."""
        self._num_arrived[exchange] = self._num_arrived.get(exchange, 0) + 1

    @torch.no_grad()
    def carry_out(self, exchange: int, mode: str) -> None:
        """Do it, unless it has been done."""
        if exchange <= self._num_done:
            return
        assert self._num_arrived.pop(exchange) == self.number, "an exchange before everybody has handed in"
        self._num_done = exchange
        if mode == GRADIENTS:
            self._average_gradients()
        elif mode == VALIDATION:
            self.mean = self.means.take([one.averager.parameters for one in self.replicas], full=True)
        else:
            self._average()

    def _average_gradients(self) -> None:
        gradients: list[list[torch.Tensor]] = []
        for replica in self.replicas:
            replica_gradients = []
            for parameter in replica.averager.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                replica_gradients.append(parameter.grad)
            gradients.append(replica_gradients)
        means = self._reducer.take(gradients)
        for replica, own in zip(self.replicas, gradients, strict=True):
            torch._foreach_copy_(own, means)
            replica.move()

    def _average(self) -> None:
        """Everybody's averager at once: each asks the same questions in the same order."""
        asking = [replica.average() for replica in self.replicas]
        answers: list[Any] = [None] * self.number
        while True:
            asks: list[Ask] = []
            for one, answer in zip(asking, answers, strict=True):
                try:
                    asks.append(one.send(answer))
                except StopIteration:
                    continue
            if not asks:
                return
            if asks[0].numbers:
                answers = [torch.tensor([ask.numbers for ask in asks])] * self.number
            else:
                means = self.means.take([ask.tensors for ask in asks], asks[0].full)
                answers = [[mean.clone() for mean in means] for _ in asks]


def modules_of(module: nn.Module, number: int) -> list[nn.Module]:
    """`module` and copies of it: one for every worker."""
    return [module, *(copy.deepcopy(module) for _ in range(number - 1))]
