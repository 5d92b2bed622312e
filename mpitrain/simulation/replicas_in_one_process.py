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
from mpitrain.model.flat import all_finite, trainable
from mpitrain.model.loss import read_loss
from mpitrain.model.optimizer import Rates
from mpitrain.model.worker_replica import seed_step
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.sampling.peer_partition import Turn
from mpitrain.training.local_sgd.averager import Ask, Averager
from mpitrain.training.local_sgd.means import MeansTogether
from mpitrain.training.measure import build_optimizer

GRADIENTS, PARAMETERS, VALIDATION = "gradients", "parameters", "validation"


class LocalReplica:
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
        self.job, self.module, self.rank, self.table = job, module, rank, table
        self.fetch, self.epoch_samples = fetch, epoch_samples
        self.optimizer = build_optimizer(job, module, lr)
        self.averager = Averager(module, self.optimizer, strategy, means=table.means.shares[rank])
        self.gradients = [parameter for _, parameter, _ in trainable(module, self.optimizer)]
        self.samples = self.nonfinite = self.skipped = 0
        self.refused = self.failure = ""
        self._rates, self._num_exchanges = Rates(self.optimizer), 0
        self._mode, self._stepped, self._count, self._loss = PARAMETERS, True, 0, 0.0

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run."""
        return bool(self.failure)

    def step(self, turn: Turn) -> float:
        """Forward and backward over the turn's lease, and the optimizer's step where gradients are not averaged."""
        lease = turn.lease
        assert lease is not None
        batch = self.fetch(lease.epoch, lease.start, lease.num_samples)
        seed_step(self.job.seed, self.rank, turn.step)
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.averager.begin_step()
        loss = read_loss(self.job.loss(self.module, batch)).mean
        value = self._loss = float(loss.detach())
        weight = turn.weight if value - value == 0.0 else float("nan")
        (loss if weight == 1.0 else loss * weight).backward()
        self._count, self._stepped = turn.num_samples, not self.averager.averages_gradients
        if self._stepped:
            if self._is_finite():
                self._move()
            else:
                self._refuse(turn.step)
            self.samples += turn.num_samples
        return value

    def _is_finite(self) -> bool:
        return all_finite([p.grad for p in self.gradients if p.grad is not None])

    def _move(self) -> None:
        if self.job.schedule is not None:
            progress = self.samples / self.epoch_samples
            self._rates.set(self.job.schedule.factor(progress, self.table.number))
        self.optimizer.step()

    def _refuse(self, step: int) -> None:
        self.skipped += 1
        if self.job.on_nonfinite == "stop":
            what = (
                "the gradient is not finite" if self._loss - self._loss == 0.0 else f"loss is {self._loss:g}"
            )
            self.refused = self.refused or f"rank {self.rank} (worker, step {step}): {what}"

    def move_on_mean(self, step: int) -> None:
        """The gradients are the mean of all."""
        if self._is_finite():
            self._move()
            self.samples += self._count
            return
        self.nonfinite += 1
        if self.job.on_nonfinite == "stop":
            self.failure = f"step {step}: the averaged gradient is not finite"

    def due(self, turn: Turn) -> tuple[float, bool]:
        """Bytes of the exchange that this step calls for: of gradients, and then, where it is time, of parameters."""
        self.table.step = turn.step
        if not self._stepped:
            self._stepped, self._mode = True, GRADIENTS
            return float(sum(p.numel() * p.element_size() for p in self.gradients)), True
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
        return float(sum(p.numel() * p.element_size() for p in self.gradients))

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
        self.number, self.step = number, 0
        self.means = MeansTogether(strategy.wire, number)
        self._reducer = MeansTogether("full", number)  # of gradients: no averaging, and not counted as one
        self.replicas: list[LocalReplica] = []
        self.measure: Callable[[], dict[str, float]] | None = None
        self.mean: list[torch.Tensor] = []  # what a validation measures
        self._num_arrived: dict[int, int] = {}
        self._num_done = 0

    def seat(self, replicas: list[LocalReplica]) -> None:
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
            self._hear_what_went_wrong()
            self._average()

    def _average_gradients(self) -> None:
        gradients: list[list[torch.Tensor]] = []
        for replica in self.replicas:
            replica_gradients = []
            for parameter in replica.gradients:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                replica_gradients.append(parameter.grad)
            gradients.append(replica_gradients)
        means = self._reducer.take(gradients)
        for replica, own in zip(self.replicas, gradients, strict=True):
            torch._foreach_copy_(own, means)
            replica.move_on_mean(self.step)

    def _hear_what_went_wrong(self) -> None:
        refused = next((one.refused for one in self.replicas if one.refused), "")
        total = sum(one.skipped for one in self.replicas)
        for replica in self.replicas:
            replica.nonfinite, replica.skipped = replica.nonfinite + total, 0
            replica.failure = replica.failure or refused

    def _average(self) -> None:
        """Everybody's averager at once: each asks the same questions in the same order."""
        asking = [replica.averager.rounds() for replica in self.replicas]
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
