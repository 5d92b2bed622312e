"""When peers write a checkpoint, and when they ask one another whether to.

Invariants: arithmetic on counts that all peers share. A mark in samples needs no message; what one peer alone
knows (that it was told to end, that time is up) is agreed over the tree of all peers every so many steps, about twice a
second, or, where peers do not wait for one another, at their meetings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.effects import Kind, Message
from mpitrain.roles.protocols import Keeper

LOOK_EVERY_S = 0.5
MOST_STEPS = 1000


class PeerCuts:
    """One peer's part in it.

    Args:
        keeper: writes; parts: of a checkpoint, on the first peer.
        next_mark: samples at which the next one is due; 0 where time is counted, which only the first peer looks at.
        samples: of all peers so far; asynchronous: peers do not wait for one another.
    """

    def __init__(
        self,
        keeper: Keeper,
        parts: list[str],
        next_mark: Callable[[int], int],
        samples: int = 0,
        asynchronous: bool = False,
    ):
        self.keeper, self.parts, self.next_mark, self.asynchronous = keeper, parts, next_mark, asynchronous
        self.ended = False
        self._mark, self._timed = next_mark(samples), next_mark(samples) == 0
        self._now = False  # decided by what a peer was told, or by time
        self._due_samples = 0
        self._look_at, self._last = 0, (-1, 0.0)

    def asked(self) -> bool:
        """Whether this peer was told to end."""
        return self.keeper.asked()

    def agrees_after(self, step: int, met: bool) -> bool:
        """Whether all peers ask one another after this step."""
        return met if self.asynchronous else step >= self._look_at

    def decide(self, asked: bool, step: int, samples: int, now_s: float) -> Message:
        """The first peer's answer for all: whether to write now, whether to end, and when to ask again."""
        last_step, last_s = self._last if self._last[0] >= 0 else (step, 0.0)
        per_step_s = max(1e-6, (now_s - last_s) / max(1, step - last_step))
        self._last = (step, now_s)
        steps = max(1, min(MOST_STEPS, int(LOOK_EVERY_S / per_step_s)))
        timed = self._timed and self.keeper.next_mark(samples) > 0
        return Message(
            Kind.AGREED, version=step, step=step, ends=asked, cut=int(asked or timed), batches=step + steps
        )

    def take(self, decided: Message) -> None:
        """What was decided."""
        self._now, self.ended, self._look_at = bool(decided.cut), decided.ends, decided.batches

    def is_due(self, samples: int, met: bool) -> bool:
        """Whether to write now, after so many samples of all peers."""
        due = self._now or (0 < self._mark <= samples and (met or not self.asynchronous))
        if due:
            self._now, self._due_samples, self._mark = False, samples, self.next_mark(samples)
        return due

    def save(self, state: dict[str, Any]) -> None:
        """Write this peer's part."""
        self.keeper.save(self._due_samples, state, self.parts)
