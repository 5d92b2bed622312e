"""When every shard writes its part of a checkpoint, agreed without a message of its own.

Invariants: the dealing server names the next point (accepted samples) ahead of time; the request travels on
its answers to the workers and on what they send to the other servers; each shard writes at its first update at or
beyond that point, or, where the run ends with it, when the last worker has left. In lockstep all shards have the same
update there, and each worker learns, with the answer that follows, that what it holds now belongs to the checkpoint.
Without lockstep every shard is cut at its own version. The end of a run that was not asked for is written when the
final model is: the dealing server lets the workers go with the name of that checkpoint, and they leave the others with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from mpitrain.messages import CheckpointRequest
from mpitrain.roles.protocols import CheckpointWriter


class CheckpointSchedule:
    """One server's part in it.

    Args:
        writer: of this shard's parts; None where nothing is to be written.
        decides: whether this server names the points.
    """

    def __init__(self, writer: CheckpointWriter | None, decides: bool):
        self.writer, self.decides = writer, decides
        self.request: CheckpointRequest | None = None  # the next one, or the last while no other is due
        self.last = 0
        self.ended = False
        self._last_samples = 0  # that the last one holds, which was named before the update that it holds
        self._last_at = 0  # the end of the run, as others have named it
        self._to_report: dict[int, int] = {}  # workers whose next answer says that it belongs to a checkpoint

    @property
    def final(self) -> bool:
        """Whether the run ends with the next checkpoint."""
        return self.request is not None and self.request.final

    @property
    def _next_at(self) -> int:
        """Samples at which the next checkpoint is written; 0: none is due."""
        return self.request.at or 0 if self.request is not None else 0

    def look_for_one(self, samples: int, present: Set[int]) -> None:
        """Name the point of the next checkpoint where one is due (the dealing server, after every update), once the
        workers that are `present` all know of the last one: each writes its part of that when it is answered."""
        if self.writer is None or not self.decides or self.final:
            return
        if self.writer.asked():
            self.request = CheckpointRequest(samples + 1, final=True)
        elif self._next_at <= self.last and not any(worker in present for worker in self._to_report):
            at = self.writer.next_checkpoint_at(samples)
            self.request = CheckpointRequest(at) if at else None

    def name_last(self, samples: int, restored: int, out_of_turn: bool) -> bool:
        """Whether the dealing server writes the end of the run, when nobody pushes any more. `restored`: samples of the
        checkpoint from which the run went on; `out_of_turn`: the last update was of a rest, as in no run that goes on:
        then only if there is no checkpoint before it."""
        before = max(self._last_samples, restored)
        writes = self.writer is not None and self.writer.writes_last and samples > before
        if not writes or (out_of_turn and before):
            return False
        self.request = CheckpointRequest(samples)
        return True

    def hear_last(self, at: int) -> None:
        """Take over the name of that checkpoint, which may be below what this server has accepted."""
        if at > self.last and not self.ended:
            self.request = CheckpointRequest(at)
            self._last_at = at

    @property
    def writes_last(self) -> bool:
        """Whether this server, which was told so, writes the end of the run now."""
        return self.writer is not None and self._last_at > self.last

    def hear_request(self, request: CheckpointRequest | None, samples: int) -> None:
        """Take over what a push brings: the next point from the dealing server, or that its sender has been asked to
        end."""
        if self.writer is None or self.final or request is None:
            return
        if request.at is None:
            if self.decides:
                self.request = CheckpointRequest(samples + 1, final=True)
        elif not self.decides and request.at > self.last:
            self.request = request

    def due(self, samples: int) -> bool:
        """Whether this update is the one to write."""
        return self.writer is not None and self.last < self._next_at <= samples

    def try_out(self, state: Callable[[], dict[str, Any]]) -> None:
        """An update has been made."""
        if self.writer is not None:
            self.writer.try_out(state)

    def save(
        self, state: dict[str, Any], num_shards: int, present: Set[int], workers: tuple[int, ...]
    ) -> None:
        """Write `state`; from now on the answers to the workers that have a part say that they belong to it."""
        assert self.writer is not None
        writers = sorted(worker for worker in self.writer.writers if worker in present)
        parts = [f"shard-{i}" for i in range(num_shards)] + [f"worker-{workers.index(w)}" for w in writers]
        self.writer.save(self._next_at, state, parts if self.decides else ())
        self.last, self.ended = self._next_at, self.final
        self._last_samples = state["ledger"]["samples_accepted"]
        if self.decides:
            self._to_report = dict.fromkeys(writers, self.last)

    def on_answer(self, worker: int) -> tuple[CheckpointRequest | None, int]:
        """What an answer to `worker` says: the next checkpoint, and the one that the answer belongs to, or 0."""
        if self.writer is None:
            return None, 0
        if not self.decides and self.writer.asked() and not self.final:  # the workers pass it on
            return CheckpointRequest(), 0
        return self.request, self._to_report.pop(worker, 0)
