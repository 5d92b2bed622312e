"""One worker under local SGD: its steps between two averagings, and what it brings to an averaging.

Invariants: the same code runs over MPI and in virtual time; only what answers its questions (`Ask`) differs. Between
two averagings no byte travels. A gradient that is not finite moves nothing here; the other workers are told of it with
the next averaging, and a run that is to stop then stops everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpitrain.job import Job
from mpitrain.model.loss import BatchLoss
from mpitrain.training.local_sgd.averager import Ask, Asking, Averager
from mpitrain.training.synchronous.stepper import Batch, Stepper


class LocalReplica(Stepper):
    """The stepper of a worker.

    Args:
        averager: of the workers' parameters; the others as for a `Stepper`.

    Attributes:
        local_nonfinite: steps that this worker has left out, as far as the others know of them.
    """

    def __init__(
        self,
        averager: Averager,
        job: Job,
        num_workers: int,
        epoch_samples: int,
        rank: int,
        where: Callable[[], str],
    ):
        super().__init__(job, num_workers, epoch_samples, rank, where)
        self.averager = averager
        self.local_nonfinite = self._skipped = 0
        self._refused = ""

    @property
    def averages_gradients(self) -> bool:
        return self.averager.averages_gradients

    def backward(self, batch: Batch | None, share: int, weight: float) -> float:
        if self.parallel is not None:
            self.parallel.exchange(self.averages_gradients)
        self.averager.begin_step()
        return super().backward(batch, share, weight)

    def weigh(self, returned: BatchLoss, weight: float) -> tuple[torch.Tensor, float]:
        if self.parallel is None:  # nobody else is asked in a backward pass
            return returned.mean, weight
        return super().weigh(returned, weight)

    def on_nonfinite(self, value: float, count: int) -> None:
        if self.averages_gradients:
            super().on_nonfinite(value, count)
            return
        self.samples += count
        self._skipped += 1
        if self.job.on_nonfinite == "stop":
            what = f"loss is {value:g}" if value - value != 0.0 else "the gradient is not finite"
            self._refused = self._refused or f"{self.where()}: {what}"

    @torch.no_grad()
    def average(self) -> Asking:
        """Tell the others what went wrong since the last time, and take the mean of what all hold."""
        rows = yield Ask(numbers=(self._skipped, int(bool(self._refused))))
        self.nonfinite += int(rows[:, 0].sum())
        self.local_nonfinite, self._skipped = self.local_nonfinite + self._skipped, 0
        if rows[:, 1].any():
            other = f"step {self.step - 1}: another worker's gradient is not finite"
            self.failure = self._refused or other
        yield from self.averager.rounds()
