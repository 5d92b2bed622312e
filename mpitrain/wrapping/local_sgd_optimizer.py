"""The optimizer that a wrapped loop holds under local SGD: the user's own, which averages when it is due.

Invariants: `step()` steps the user's optimizer on this worker alone; averagings come after it. A worker that
sees a gradient that is not finite leaves out the step and goes on until the next averaging, where all
learn of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import LostRankError, NonFiniteError, UsageError
from mpitrain.model.optimizers.optimizer import Rates, check_closure
from mpitrain.model.wire.flat import all_finite
from mpitrain.mpi.runtime import Runtime
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.part_names import own_part
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.measure import share_module
from mpitrain.training.replica_guard import ReplicaGuard
from mpitrain.training.session import attempt
from mpitrain.wrapping.checkpoints import (
    Resumed,
    Saver,
    about_loop,
    find_run,
    keep_allreduce,
    lockstep_saver,
    loop_state,
)
from mpitrain.wrapping.delegating import DelegatingOptimizer
from mpitrain.wrapping.exchange import Exchange
from mpitrain.wrapping.membership import make_group


class LocalSGDOptimizer(DelegatingOptimizer):
    """The user's optimizer, with its groups and state, and the averager that follows its steps.

    Args:
        averager: of the workers' parameters.
        exchange: what averages gradients until `start`, if there is a start.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        averager: Averager,
        exchange: Exchange | None = None,
    ):
        super().__init__(optimizer, str(averager.strategy))
        self._runtime, self._averager, self._exchange = runtime, averager, exchange
        self._guard = ReplicaGuard(runtime, averager.strategy, averager.held_alike)
        self._num_steps = self._skipped = 0

    def step(self, closure: Any = None) -> Any:
        """One step of this worker, and an averaging where it is due. Returns the closure's loss.

        Raises:
            NonFiniteError: at an averaging, on all workers: some worker's gradient held a NaN or an infinity.
            UsageError: the loss leaves out parameters whose gradients are averaged.
            ReplicasPartedError: on all workers: they hold different numbers where they must hold the same.
        """
        loss = closure() if closure is not None else None
        if self._exchange is not None:
            self._exchange.check_whole()
        self._runtime.step = self._num_steps
        gradients = [p.grad for p in self._averager.parameters if p.grad is not None]
        alone = not self._averager.averages_gradients
        self._averager.begin_step()
        if all_finite(gradients):
            self.own_step()
        elif alone:
            self._skipped += 1
        else:  # the same on every rank: it was averaged
            raise NonFiniteError(f"{self._runtime.where()}: the averaged gradient is not finite")
        self._num_steps += 1
        if self._averager.end_step():
            self._average()
        if not self._averager.is_apart:
            self._guard.after_step()
        self._turn()
        return loss

    def _turn(self) -> None:
        if self._exchange is not None:
            self._exchange.turn(self._averager.averages_gradients)

    def _average(self) -> None:
        rows = self._averager.gather_numbers(self._skipped, self._num_steps)
        steps = rows[:, 1].tolist()
        if len(set(steps)) > 1:  # before anything is averaged that belongs to different steps
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(steps))
            raise LostRankError(
                f"{self._runtime.where()}: the workers meet after different numbers of steps ({counts}): give every "
                "worker equally many batches, and let none end by itself (by sys.exit, say, or by mpitrain.finish)"
            )
        rows = rows[:, :1]
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

    def own_state(self) -> dict[str, Any]:
        """This worker's, with the model's: workers may be apart."""
        counts = {"num_steps": self._num_steps, "skipped": self._skipped}
        held = {"module": self._averager.module.state_dict(), "optimizer": self.inner.state_dict()}
        return held | {"averager": self._averager.state(), "counts": counts}

    def restore_counts(self, state: dict[str, Any]) -> None:
        """Continue from what `own_state` returned; model, optimizer and averager have."""
        self._num_steps, self._skipped = state["counts"]["num_steps"], state["counts"]["skipped"]
        self._turn()


def join_local_sgd(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: LocalSGD,
    resume: Any,
    number: int = 0,
    find_unused: bool | None = None,
) -> tuple[LocalSGDOptimizer, Saver, Resumed | None]:
    """Workers that step by themselves and average now and then. `number`: of the model, where the program has several;
    `find_unused`: as for `Exchange`.

    Raises:
        UsageError (AgreedError under MPI): periods in samples, or a checkpoint of another run or number of workers.
    """
    if strategy.unit != "steps":
        raise UsageError(f'{strategy}: your own loop counts steps, not samples; use unit="steps" with wrap')
    runtime.role = "worker"
    attempt(runtime, lambda: check_closure(optimizer, str(strategy)))
    runtime.compare({"strategy": str(strategy)})
    about = about_loop(strategy, model, runtime.size)
    run = find_run(runtime, resume, about, same_number=True, number=number)
    found = run.found
    share_module(runtime, model)
    if number == 0:
        keep_allreduce(runtime, found, about)
        make_group(runtime)
    averager = Averager(model, optimizer, strategy)
    exchange = Exchange(model, find_unused=find_unused) if strategy.start else None
    part, rates = own_part(runtime.rank), Rates(optimizer)
    saved = found.part(part) if found else None
    if saved is not None:
        model.load_state_dict(saved["module"])
        rates.restore(saved["optimizer"])
        averager.restore(saved["averager"])
    local_sgd = LocalSGDOptimizer(runtime, optimizer, averager, exchange)
    if saved is not None:
        local_sgd.restore_counts(saved)

    def take() -> dict[str, Any]:
        return local_sgd.own_state() | {"optimizer": rates.state()}

    saver = lockstep_saver(run, about, runtime.rank, runtime.size, take)
    return local_sgd, saver, loop_state(found, saved)
