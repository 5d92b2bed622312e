"""When every shard writes its part of a checkpoint, agreed without a message of its own.

Invariants: the dealing server names the next point, `checkpoint_at` (accepted samples), ahead of time; it travels on
its answers to the workers and on what they send to the other servers; each shard writes at its first update at or
beyond that point, or, where the run ends with it, when the last worker has left. In lockstep all shards have the same
update there, and each worker is told, with the answer that follows, that what it holds now belongs to the checkpoint.
Without lockstep every shard is cut at its own version.
"""

from __future__ import annotations

from typing import Any

from mpitrain.effects import REQUESTED, Message
from mpitrain.roles.protocols import Keeper


class CheckpointSchedule:
    """One server's part in it.

    Args:
        keeper: writes; None where nothing is to be written.
        decides: whether this server names the points.
    """

    def __init__(self, keeper: Keeper | None, decides: bool):
        self.keeper, self.decides = keeper, decides
        self.checkpoint_at = self.last = 0
        self.final = self.ended = False
        self._to_report: dict[int, int] = {}  # workers whose next answer says that it belongs to a checkpoint

    def look(self, samples: int) -> None:
        """Name the point of the next checkpoint where one is due (the dealing server, after every update)."""
        if self.keeper is None or not self.decides or self.final:
            return
        if self.keeper.asked():
            self.checkpoint_at, self.final = samples + 1, True
        elif self.checkpoint_at <= self.last:
            self.checkpoint_at = self.keeper.next_checkpoint_at(samples)

    def hear(self, message: Message, samples: int) -> None:
        """Take over what a push brings: the next point from the dealing server, or that its sender was told to end."""
        if self.keeper is None or self.final:
            return
        if self.decides and message.checkpoint_at == REQUESTED:
            self.checkpoint_at, self.final = samples + 1, True
        elif not self.decides and message.checkpoint_at > self.last:
            self.checkpoint_at, self.final = message.checkpoint_at, message.final

    def due(self, samples: int) -> bool:
        """Whether this update is the one to write."""
        return self.keeper is not None and self.last < self.checkpoint_at <= samples

    def save(
        self, state: dict[str, Any], num_shards: int, present: set[int], workers: tuple[int, ...]
    ) -> None:
        """Write `state`; from now on the answers to the workers that have a part say that they belong to it."""
        assert self.keeper is not None
        writers = sorted(present.intersection(self.keeper.writers))
        parts = [f"shard-{i}" for i in range(num_shards)] + [f"worker-{workers.index(w)}" for w in writers]
        self.keeper.save(self.checkpoint_at, state, parts if self.decides else ())
        self.last, self.ended = self.checkpoint_at, self.final
        if self.decides:
            self._to_report = dict.fromkeys(writers, self.checkpoint_at)

    def on_answer(self, worker: int) -> dict[str, Any]:
        """Fields of an answer to `worker`."""
        if self.keeper is None:
            return {}
        if not self.decides and self.keeper.asked() and not self.final:  # the workers pass it on
            return {"checkpoint_at": REQUESTED}
        return {
            "checkpoint_at": self.checkpoint_at,
            "final": self.final,
            "checkpoint": self._to_report.pop(worker, 0),
        }
