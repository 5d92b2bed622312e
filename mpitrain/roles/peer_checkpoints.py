"""When peers write a checkpoint, and when they ask one another whether to.

Invariants: arithmetic on counts that all peers share. A checkpoint that is due in samples needs no message; what one
peer alone knows (that it was asked to end, that time is up) is agreed over the tree of all peers every so many steps,
about twice a second, or, where peers do not wait for one another, at their meetings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.messages import Agreed
from mpitrain.roles.protocols import CheckpointWriter
from mpitrain.strategies.checkpoint_policy import Cadence


class PeerCheckpoints:
    """One peer's part in it.

    Args:
        writer: of this peer's parts; parts: all parts of a checkpoint, on the first peer.
        cadence: when; time, where that counts, is looked at by the first peer alone.
        asynchronous: peers do not wait for one another.
        written_at: samples of the checkpoint from which the run goes on.
    """

    def __init__(
        self, writer: CheckpointWriter, parts: list[str], cadence: Cadence, asynchronous: bool = False,
        written_at: int = 0,
    ):  # fmt: skip
        self.writer, self.parts, self.cadence, self.asynchronous = writer, parts, cadence, asynchronous
        self.ended = False
        self._wants_end = False
        self._now = False  # decided by what a peer was asked, or by time
        self._due_samples, self._asked_s = written_at, 0.0

    def asked(self) -> bool:
        """Whether this peer was asked to end, or wants to."""
        return self._wants_end or self.writer.asked()

    def validated(self, step: int, over: bool, together: bool) -> None:
        """A validation before this step may have ended the run, which one peer knows: all ask after the step, where all
        know (`together`) that there was one, or else when they ask next."""
        self._wants_end = self._wants_end or over
        if together:
            self.cadence.ask_at = min(self.cadence.ask_at, step)

    def agrees_after(self, step: int, met: bool) -> bool:
        """Whether all peers ask one another after this step."""
        return met if self.asynchronous else step >= self.cadence.ask_at

    def decide(self, asked: bool, step: int, samples: int, now_s: float) -> Agreed:
        """The first peer's answer for all: whether to write now, whether to end, and when to ask again."""
        steps = self.cadence.steps_to_next_question(step, self._asked_s, now_s)
        self._asked_s = now_s
        timed = self.writer.time_is_up()
        return Agreed(step, writes=asked or timed, ends=asked, ask_at=step + steps)

    def take_decision(self, decided: Agreed) -> None:
        """What was decided."""
        self._now, self.ended, self.cadence.ask_at = decided.writes, decided.ends, decided.ask_at

    def is_due(self, samples: int, met: bool) -> bool:
        """Whether to write now, after so many samples of all peers."""
        due = self._now or (self.cadence.is_due(samples) and (met or not self.asynchronous))
        if due:
            self._now, self._due_samples = False, samples
            self.cadence.go_on_from(samples)
        return due

    def is_last(self, samples: int) -> bool:
        """Whether to write now that the run has come to its end."""
        due = self.writer.writes_last and samples > self._due_samples
        self._due_samples = max(samples, self._due_samples)
        return due

    def try_out(self, state: Callable[[], dict[str, Any]]) -> None:
        """A step has been taken."""
        self.writer.try_out(state)

    def save(self, state: dict[str, Any]) -> None:
        """Write this peer's part."""
        self.writer.save(self._due_samples, state, self.parts)
