"""When every shard writes its part of a checkpoint, agreed without a message of its own.

Invariants: the dealing server names a mark (accepted samples) ahead of time; it travels on its answers to the
workers and on what they send to the other servers; each shard writes at its first update at or beyond the mark, or,
where the run ends with it, when the last worker has left. In lockstep all shards have the same update there, and each
worker is told, with the answer that follows, that what it holds now belongs to the checkpoint. Without lockstep every
shard is cut at its own version.
"""

from __future__ import annotations

from typing import Any

from mpitrain.effects import ASKS, Message
from mpitrain.roles.protocols import Keeper


class CheckpointSchedule:
    """One server's part in it.

    Args:
        keeper: writes; None where nothing is to be written.
        deals: whether this server names the marks.
    """

    def __init__(self, keeper: Keeper | None, deals: bool):
        self.keeper, self.leases = keeper, deals
        self.mark = self.last = 0
        self.ends = self.ended = False
        self._told: dict[int, int] = {}  # workers whose next answer says that it belongs to a checkpoint

    def look(self, samples: int) -> None:
        """Name the next mark where one is due (the dealing server, after every update)."""
        if self.keeper is None or not self.leases or self.ends:
            return
        if self.keeper.asked():
            self.mark, self.ends = samples + 1, True
        elif self.mark <= self.last:
            self.mark = self.keeper.next_checkpoint_at(samples)

    def hear(self, message: Message, samples: int) -> None:
        """Take over what a push tells: a mark from the dealing server, or that its sender was told to end."""
        if self.keeper is None or self.ends:
            return
        if self.leases and message.mark == ASKS:
            self.mark, self.ends = samples + 1, True
        elif not self.leases and message.mark > self.last:
            self.mark, self.ends = message.mark, message.ends

    def due(self, samples: int) -> bool:
        """Whether this update is the one to write."""
        return self.keeper is not None and self.last < self.mark <= samples

    def save(
        self, state: dict[str, Any], num_shards: int, present: set[int], workers: tuple[int, ...]
    ) -> None:
        """Write `state`; from now on the answers to the workers that have a part say that they belong to it."""
        assert self.keeper is not None
        writers = sorted(present.intersection(self.keeper.writers))
        parts = [f"shard-{i}" for i in range(num_shards)] + [f"worker-{workers.index(w)}" for w in writers]
        self.keeper.save(self.mark, state, parts if self.leases else ())
        self.last, self.ended = self.mark, self.ends
        if self.leases:
            self._told = dict.fromkeys(writers, self.mark)

    def on_answer(self, worker: int) -> dict[str, Any]:
        """Fields of an answer to `worker`."""
        if self.keeper is None:
            return {}
        if not self.leases and self.keeper.asked() and not self.ends:  # the workers pass it on
            return {"mark": ASKS}
        return {"mark": self.mark, "ends": self.ends, "cut": self._told.pop(worker, 0)}
