"""Everybody's share of the global order where nobody deals: peers walk the same course, each over its own part.

Invariants: the course is a pure function of (samples, epochs, batch size, peers, warm-up); every peer knows
everybody's share without a message. A global batch is cut into contiguous shares that differ by at most one sample; a
rest too small to give every peer one is left out. All peers take the same number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mpitrain.messages import Lease
from mpitrain.strategies.sampling.dealer import check_batch_size, share_out
from mpitrain.strategies.warmup import Warmup


class Turn(NamedTuple):
    """One step of all peers. `lease`: this peer's share, None where it waits (warm-up); `num_samples` of all together,
    `samples_before` in all before this step; the first `num_active` peers take part.
    """

    step: int
    lease: Lease | None
    epoch: int
    num_samples: int
    samples_before: int
    num_active: int

    @property
    def weight(self) -> float:
        """What makes the mean over the active peers the mean over their samples."""
        assert self.lease is not None
        return self.lease.num_samples * self.num_active / self.num_samples


@dataclass(eq=False)
class PeerPartition:
    """The course of one peer.

    Args:
        num_samples, num_epochs, batch_size: batch_size is per peer.
        num_peers, peer: how many, and which this is, from 0.
        num_steps: stop after so many, however many epochs that takes; None for no such limit.
        drop_last: leave out an incomplete last global batch.
        warmup: how many peers train at first.
    """

    num_samples: int
    num_epochs: int
    batch_size: int
    num_peers: int
    peer: int
    num_steps: int | None = None
    drop_last: bool = False
    warmup: Warmup = Warmup()

    def __post_init__(self) -> None:
        assert self.num_samples >= self.num_peers > self.peer >= 0 and self.batch_size > 0
        self.step = self.epoch = self.cursor = self.samples = self.num_left_out = 0

    def num_active(self) -> int:
        """Peers that take part in the step to come."""
        if self.warmup.epochs and not self.warmup.is_over(self.samples, self.num_samples):
            return min(self.warmup.workers, self.num_peers)
        return self.num_peers

    def next(self) -> Turn | None:
        """The next step, or None at the end."""
        if self.num_steps is not None and self.step >= self.num_steps:
            return None
        active = self.num_active()
        batch = self.batch_size * active
        left = self.num_samples - self.cursor
        if left < active or (self.drop_last and left < batch <= self.num_samples):
            self.num_left_out += left
            self.epoch, self.cursor = self.epoch + 1, 0
        if self.num_steps is None and self.epoch >= self.num_epochs:
            return None
        count = min(batch, self.num_samples - self.cursor)
        lease = None
        if self.peer < active:
            lease = Lease(self.epoch, *share_out(self.cursor, count, active, self.peer))
        turn = Turn(self.step, lease, self.epoch, count, self.samples, active)
        self.step, self.cursor, self.samples = self.step + 1, self.cursor + count, self.samples + count
        return turn

    def peek(self) -> Turn | None:
        """What `next` would answer."""
        here = self.state()
        turn = self.next()
        self.restore(here)
        return turn

    def state(self) -> dict[str, Any]:
        """Position in the course: integers only."""
        return {
            "step": self.step, "epoch": self.epoch, "cursor": self.cursor, "samples": self.samples,
            "num_left_out": self.num_left_out, "batch_size": self.batch_size,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, also with another number of peers.

        Raises:
            UsageError: other batches in the middle of an epoch.
        """
        left, before = self.num_samples - state["cursor"], state["batch_size"]
        is_over = left < self.num_peers or (self.drop_last and left < before * self.num_peers)
        between = is_over or state["cursor"] == 0
        check_batch_size(before, self.batch_size, state["epoch"], between)
        self.step, self.epoch, self.cursor = state["step"], state["epoch"], state["cursor"]
        self.samples, self.num_left_out = state["samples"], state["num_left_out"]


class Endless:
    """The course of one peer whose data are somebody else's: turns without end, each of one sample a peer."""

    num_left_out = epoch = 0

    def __init__(self, num_peers: int, peer: int):
        self.num_peers, self.peer, self.step = num_peers, peer, 0

    @property
    def samples(self) -> int:
        """Of all peers."""
        return self.step * self.num_peers

    def num_active(self) -> int:
        """All."""
        return self.num_peers

    def next(self) -> Turn:
        """The next step."""
        before = self.samples
        self.step += 1
        return Turn(self.step - 1, Lease(0, before + self.peer, 1), 0, self.num_peers, before, self.num_peers)

    def peek(self) -> Turn | None:
        """Nothing: what comes is somebody else's."""
        return None

    def state(self) -> dict[str, Any]:
        """Steps begun."""
        return {"step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.step = state["step"]
