"""The optimizer that a wrapped loop holds under periodic averaging: the user's own, which averages when it is due.

Law of this file: `step()` steps the user's optimizer on this worker alone; averagings come after it. A worker that
sees a gradient that is not finite leaves out the step and goes on until the next averaging, where all hear of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from mpitrain.errors import NonFiniteError
from mpitrain.model.flat import all_finite

if TYPE_CHECKING:
    from mpitrain.training.averaging import Averager


class AveragedOptimizer(Optimizer):
    """The user's optimizer, with its groups and state, and the averager that follows its steps.

    Args:
        averager: of the workers' parameters.
        parallel: the DistributedDataParallel that averages gradients until `start`, if there is a start.
    """

    def __init__(self, runtime: Any, optimizer: Optimizer, averager: Averager, parallel: Any = None):
        self.__dict__.update(
            optimizer.__dict__
        )  # the same groups and state: zero_grad and schedulers find them
        self._runtime, self._inner, self._averager, self._parallel = runtime, optimizer, averager, parallel
        self._num_steps = self._skipped = 0

    def step(self, closure: Any = None) -> Any:
        """One step of this worker, and an averaging where it is due. Returns the closure's loss.

        Raises:
            NonFiniteError: at an averaging, on all workers: some worker's gradient held a NaN or an infinity.
        """
        loss = closure() if closure is not None else None
        self._runtime.step = self._num_steps
        gradients = [p.grad for p in self._averager.parameters if p.grad is not None]
        alone = not self._averager.averages_gradients
        self._averager.begin_step()
        if not gradients or all_finite(gradients):
            self._inner.step()
        elif alone:
            self._skipped += 1
        else:  # the same on every rank: it was averaged
            raise NonFiniteError(f"{self._runtime.where()}: the averaged gradient is not finite")
        self._num_steps += 1
        if self._averager.end_step():
            self._average()
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = self._averager.averages_gradients
        return loss

    def _average(self) -> None:
        rows = self._averager.tell(self._skipped)
        self._averager.average()
        if rows.any():
            whose = ", ".join(f"rank {rank}" for rank, row in enumerate(rows.tolist()) if row[0])
            raise NonFiniteError(
                f"{self._runtime.where()}: training stopped: a gradient of {whose} is not finite"
            )

    def finish(self) -> None:
        """Average what is still apart; every worker then holds the same model."""
        if self._averager.is_apart:
            self._average()
