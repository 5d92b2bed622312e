"""What a worker does with its parameters between two reads, and what it pushes for it.

Invariants: the worker's parameters move by one optimizer step a batch, and what is pushed is exactly what
has happened since the last push:

    "update"      sum over the batches of (w before - w after): the server subtracts it
    "gradient"    sum over the batches of g; in between w <- w - lr g, so the server's optimizer is plain SGD's kin;
                  where the rate changes in between, sum of (lr / lr0) g, applied at lr0, the first that is not 0
    "parameters"  w itself as it was before the last step, for an elastic exchange: step and exchange start from the
                  same w (algorithm 1 of Zhang, Choromanska and LeCun 2015)

A batch whose gradient is not finite moves nothing; its push is flagged, and the server takes nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import OwnStep, without_global_hooks
from mpitrain.model.recipe import UpdateRule
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer
from mpitrain.model.wire.flat import FlatModel, all_finite
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.schedules import Pace
from mpitrain.system import trace


class LocalSteps:
    """The worker's own optimizer and what has accumulated since the last push.

    Args:
        model: whose parameters move.
        optimizer: that moves them; its state stays here for the whole run, also when parameters are read anew.
        pushes: "update", "gradient" or "parameters".
        pace: what the rates follow; None where they stay as they are.
        source: the optimizer whose rates these steps follow, where they are "gradient" steps beside a server's.
    """

    def __init__(
        self,
        model: FlatModel,
        optimizer: Optimizer,
        pushes: str,
        pace: Pace | None = None,
        source: Optimizer | None = None,
    ):
        self.model, self.optimizer, self.pushes = model, optimizer, pushes
        self._own_step = OwnStep(optimizer)  # `wrap` lets the user's optimizer step the servers from here on
        self.source = source
        self._pushed_rates: list[float] = []
        self.pace = pace or Pace()
        self._num_workers = self.pace.num_workers
        self._rates = Rates(optimizer)
        layout = model.layout
        self._pools = [BufferPool(layout.size(shard), layout.dtype) for shard in range(layout.num_shards)]
        self._moved: list[FixedBuffer] | None = None
        trace.watch(self, step=("optimizer", trace.OPTIMIZER))

    def progress(self, samples: int, living: float = 1.0) -> None:
        """So many samples have been accepted, and this part of the workers is not lost: the rate of the next step
        follows."""
        num_workers = max(1, round(living * self._num_workers))
        self.pace.change(num_workers, samples)
        factor = self.pace.factor(samples, num_workers)
        if (
            isinstance(factor, list) and self.source is not None
        ):  # the server's momentum is none of these steps'
            factor = [{"lr": group["lr"]} for group in factor]
        if factor is not None:
            self._rates.set(factor)

    def step(self) -> bool:
        """Take one step on the gradients that backward left; False, and nothing done, if they are not finite."""
        if self.pushes == "gradient":
            return self._step_on_gradient()
        gradients = [p.grad for p in self.model.parameters if p.grad is not None]
        if not all_finite(gradients):
            return False

        def go() -> bool:
            with self.model.stepping():
                self._own_step()
            return True

        return self.move(go)

    @torch.no_grad()
    def move(self, go: Callable[[], bool]) -> bool:
        """Let `go` move the parameters, and take up by how much; False, and nothing is moved, where it says so."""
        before = [pool.take() for pool in self._pools]
        for buffer, now in zip(before, self.model.current(), strict=True):
            buffer.body.copy_(now.body)
        with torch.enable_grad():
            is_good = go()
        if not is_good:
            for shard, buffer in enumerate(before):
                self.model.install(shard, buffer)
                buffer.release()
            return False
        if self.pushes == "parameters":
            self._drop()
            self._moved = before
            return True
        for buffer, now in zip(before, self.model.current(), strict=True):
            buffer.body.sub_(now.body)
        self._gather(before)
        return True

    @property
    def rates(self) -> list[float] | None:
        """At which a server is to apply the next push, by group; None where that is the optimizer's affair."""
        return list(self._pushed_rates) if self.source is not None and self.pace.schedule is None else None

    def _follow_rates(self, gradients: list[FixedBuffer]) -> None:
        """Step at the source's rates, and make what is pushed worth as much at the rates of the push."""
        if self.source is None or self.pace.schedule is not None:
            return
        now = [float(group["lr"]) for group in self.source.param_groups]
        for group, rate in zip(self.optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        if self._moved is None:
            self._pushed_rates = now
            return
        for index, rate in enumerate(now):
            first = self._pushed_rates[index]
            if not first and rate:  # what came before has moved nothing
                self._pushed_rates[index] = rate
                self._scale_group(self._moved, index, 0.0)
            elif rate != first:
                self._scale_group(gradients, index, rate / first)

    def _scale_group(self, buffers: list[FixedBuffer], group: int, factor: float) -> None:
        for shard, buffer in enumerate(buffers):
            for index, start, stop in self.model.layout.group_slices(shard):
                if index == group:
                    buffer.body[start:stop].mul_(factor)

    def _step_on_gradient(self) -> bool:
        gradients = [pool.take() for pool in self._pools]
        if not self.model.gather_gradients(gradients):
            for buffer in gradients:
                buffer.release()
            return False
        self._follow_rates(gradients)
        self._gather(gradients)
        # global hooks have run around the step that servers take
        with without_global_hooks(), self.model.stepping():
            self._own_step()
        return True

    def _gather(self, buffers: list[FixedBuffer]) -> None:
        if self._moved is None:
            self._moved = buffers
            return
        for total, buffer in zip(self._moved, buffers, strict=True):
            total.body.add_(buffer.body)
            buffer.release()

    def take_push(self) -> list[FixedBuffer]:
        """What to push, rounded for the wire; from here on it accumulates anew."""
        buffers = self.model.push_buffers()
        for index, buffer in enumerate(buffers):
            if self._moved is None:  # nothing was finite: flagged, and never used
                buffer.body.zero_()
            else:
                buffer.body.copy_(self._moved[index].body)
        self._drop()
        return buffers

    def _drop(self) -> None:
        for buffer in self._moved or ():
            buffer.release()
        self._moved = None

    def state(self) -> dict[str, Any]:
        """The optimizer's state, without what has accumulated since the last push: who resumes computes that anew."""
        return {"optimizer": self._rates.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        with self.model.stepping():
            self._rates.restore(state["optimizer"])


def local_steps(
    model: FlatModel,
    optimizer: Optimizer,
    strategy: ServerStrategy,
    rule: UpdateRule = UpdateRule(),  # noqa: B008 - frozen
) -> LocalSteps | None:
    """What the strategy asks of a worker between reads; None when it only computes gradients.

    Args:
        optimizer: the job's; used itself where the strategy says so.

    Raises:
        UsageError: local steps for a server's optimizer that is not SGD.
    """
    if not strategy.moves:
        return None
    source, pace = None, rule.pace(Rates(optimizer))
    pushes = "parameters" if strategy.elastic else "update" if strategy.optimizer == "worker" else "gradient"
    if pushes == "gradient":
        if not isinstance(optimizer, SGD):
            raise UsageError(
                f"{strategy}: between two reads the worker moves by plain SGD steps, which makes no sense beside a "
                f'server that runs {type(optimizer).__name__}; use optimizer="worker"'
            )
        source = optimizer
        groups = [{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups]
        optimizer = SGD(groups, lr=0.0)
    return LocalSteps(model, optimizer, pushes, pace, source)
