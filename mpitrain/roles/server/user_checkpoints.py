"""Checkpoints that workers ask for, where the loop is somebody else's.

Invariants: a checkpoint is written when every worker has come to ask for it, so nothing is under way and all
shards are cut at the same pushes. Who would wait for the gradients of those that have come is let go first, with what
has been gathered applied as it is. Afterwards all read the model anew and the strategy begins anew, as after a restart:
so the run that goes on and the run that is resumed are the same. Elastic workers keep parameters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from mpitrain.effects import Compute, Effect
from mpitrain.errors import UsageError
from mpitrain.messages import Message, Save
from mpitrain.roles.save_request import SaveRequest
from mpitrain.roles.server.fault_tolerant import FaultTolerantServer
from mpitrain.roles.server.worker_state import WorkerEvent, WorkerState
from mpitrain.strategies.base import Verdict

Steps = Generator[Effect, Any, None]


class SavingServer(FaultTolerantServer):
    """`FaultTolerantServer`, for workers that say when a checkpoint is written; the arguments are the same.

    Args:
        write: `write(order, state, workers)` writes this shard's part; `workers` are the ranks that write theirs.
    """

    def __init__(
        self, *args: Any, write: Callable[[SaveRequest, dict[str, Any], list[int]], None], **options: Any
    ):
        super().__init__(*args, **options)
        self._write = write
        self._answers[Save] = self._on_save

    def _on_save(self, worker: int, message: Save) -> Steps:
        self._enter(worker, WorkerEvent.SAVE, message)
        self.table[worker].save = SaveRequest(message.at, message.text)
        yield from ()

    def _upto(self) -> int | None:
        """For all while somebody saves: the others are let go when all of them have pushed."""
        return None if self.table.any_in(WorkerState.SAVING) else super()._upto()

    def _take(self, source: int, message: Message) -> Steps:
        yield from super()._take(source, message)
        yield from self._look_who_has_come()

    def _lose(self, worker: int, how: str) -> Steps:
        yield from super()._lose(worker, how)
        yield from self._look_who_has_come()

    def _look_who_has_come(self) -> Steps:
        saving = {worker: self.table[worker].save for worker in sorted(self.table.who(WorkerState.SAVING))}
        coming = self.table.present - set(saving)
        if not saving or coming - self.table.blocked:
            return
        if not self.gathering.empty:
            yield from self._carry_out(Verdict(0.0, True, ()))
        self.memory = self.strategy.start(tuple(sorted(self.table.active)))
        if coming:
            for worker in sorted(coming):
                yield from self._release(worker, 0)
            return
        orders = set(saving.values())
        if len(orders) > 1:
            points = ", ".join(f"rank {worker} at {order.checkpoint_at}" for worker, order in saving.items())
            raise UsageError(
                f"workers save different checkpoints: {points}; call save at the same step on all of them"
            )
        workers, state = list(saving), self.state()
        yield Compute(lambda: self._write(orders.pop(), state, workers), "checkpoint")
        for worker in workers:
            if self.strategy.elastic:
                self.table[worker].no_pull = True
            else:
                self.counts.leave(worker)
            yield from self._release(worker, 0, uses=self.strategy.inflight)
