"""What a worker does with its parameters between two reads, and what it pushes for it.

Law of this file: the worker's parameters move by one optimizer step a batch, and what is pushed is exactly what
has happened since the last push:

    "update"      sum over the batches of (w before - w after): the server subtracts it
    "gradient"    sum over the batches of g; in between w <- w - lr g, so the server's optimizer is plain SGD's kin
    "parameters"  w itself as it was before the last step, for an elastic exchange: step and exchange start from the
                  same w (algorithm 1 of Zhang, Choromanska and LeCun 2015)

A batch whose gradient is not finite moves nothing; its push is flagged, and the server takes nothing of it.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from mpitrain.errors import UsageError
from mpitrain.model.flat import FlatModel, all_finite
from mpitrain.model.frame import Frame, FramePool
from mpitrain.model.optimizer import Rates
from mpitrain.rules import Schedule, ServerStrategy


class LocalSteps:
    """The worker's own optimizer and what has accumulated since the last push.

    Args:
        model: whose parameters move.
        optimizer: that moves them; its state stays here for the whole run, also when parameters are read anew.
        pushes: "update", "gradient" or "parameters".
        schedule: factor on the rates, by accepted samples; epoch_samples: in an epoch; num_workers: of the run.
    """

    def __init__(
        self,
        model: FlatModel,
        optimizer: Optimizer,
        pushes: str,
        schedule: Schedule | None = None,
        epoch_samples: int = 0,
        num_workers: int = 1,
    ):
        self.model, self.optimizer, self.pushes = model, optimizer, pushes
        self.schedule, self.epoch_samples, self.num_workers = schedule, epoch_samples, num_workers
        self._rates = Rates(optimizer)
        layout = model.layout
        self._pools = [FramePool(layout.size(shard), layout.dtype) for shard in range(layout.num_shards)]
        self._moved: list[Frame] | None = None

    def progress(self, samples: int) -> None:
        """So many samples have been accepted: the rate of the next step follows."""
        if self.schedule is not None and self.epoch_samples:
            self._rates.set(self.schedule.factor(samples / self.epoch_samples, self.num_workers))

    def step(self) -> bool:
        """Take one step on the gradients that backward left; False, and nothing done, if they are not finite."""
        if self.pushes == "gradient":
            return self._step_on_gradient()
        gradients = [p.grad for p in self.model.parameters if p.grad is not None]
        if not all_finite(gradients):
            return False
        before = [pool.take() for pool in self._pools]
        for frame, now in zip(before, self.model.current(), strict=True):
            frame.body.copy_(now.body)
        self.optimizer.step()
        if self.pushes == "parameters":
            self._drop()
            self._moved = before
            return True
        for frame, now in zip(before, self.model.current(), strict=True):
            frame.body.sub_(now.body)
        self._gather(before)
        return True

    def _step_on_gradient(self) -> bool:
        gradients = [pool.take() for pool in self._pools]
        if not self.model.gather_gradients(gradients):
            for frame in gradients:
                frame.release()
            return False
        self._gather(gradients)
        self.optimizer.step()
        return True

    def _gather(self, frames: list[Frame]) -> None:
        if self._moved is None:
            self._moved = frames
            return
        for total, frame in zip(self._moved, frames, strict=True):
            total.body.add_(frame.body)
            frame.release()

    def take(self) -> list[Frame]:
        """What to push, rounded for the wire; from here on it accumulates anew."""
        frames = self.model.push_frames()
        for index, frame in enumerate(frames):
            if self._moved is None:  # nothing was finite: flagged, and never used
                frame.body.zero_()
            else:
                frame.body.copy_(self._moved[index].body)
        self._drop()
        return frames

    def _drop(self) -> None:
        for frame in self._moved or ():
            frame.release()
        self._moved = None

    def state(self) -> dict[str, Any]:
        """The optimizer's state, without what has accumulated since the last push: who resumes computes that anew."""
        return {"optimizer": self._rates.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._rates.restore(state["optimizer"])


def local_steps(
    model: FlatModel,
    optimizer: Optimizer,
    strategy: ServerStrategy,
    schedule: Schedule | None = None,
    epoch_samples: int = 0,
    num_workers: int = 1,
) -> LocalSteps | None:
    """What the strategy asks of a worker between reads; None when it only computes gradients.

    Args:
        optimizer: the job's; used itself where the strategy says so.

    Raises:
        UsageError: local steps for a server's optimizer that is not SGD.
    """
    if not strategy.moves:
        return None
    pushes = "parameters" if strategy.elastic else "update" if strategy.optimizer == "worker" else "gradient"
    if pushes == "gradient":
        if not isinstance(optimizer, SGD):
            raise UsageError(
                f"{strategy}: between two reads the worker moves by plain SGD steps, which makes no sense beside a "
                f'server that runs {type(optimizer).__name__}; use optimizer="worker"'
            )
        groups = [{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups]
        optimizer = SGD(groups, lr=0.0)
    return LocalSteps(model, optimizer, pushes, schedule, epoch_samples, num_workers)
