"""The trace of a rank in virtual time.

Invariants: a gradient's spans are measured in real time while it is computed, and stretched to the virtual time that it
takes; what takes no virtual time has spans of no length. What other threads of this process do (reading ahead) belongs
to no rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpitrain.effects import Compute, Effect
from mpitrain.messages import Message, payload_bytes, pushes_of
from mpitrain.system.trace import COMMUNICATION, COMPUTE, KINDS, OTHER, WAIT, Event, Trace, active


class VirtualTrace(Trace):
    """A `Trace` whose clock is a virtual world's."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._owner = threading.get_ident()
        self._waits_since: float | None = None
        self._waits_for = "", WAIT
        self._computed: tuple[list[Event], float, float, float] | None = None

    def add(
        self, name: str, category: str, began_s: float, ended_s: float, args: dict[str, Any] | None = None,
        flight: int = -1,
    ) -> None:  # fmt: skip
        if threading.get_ident() == self._owner:
            super().add(name, category, began_s, ended_s, args, flight)

    def step(self, number: int) -> None:
        """As `begin_step`, for this rank."""
        with active(self):
            self.begin_step(number)

    def send_on(self, send: Callable[[Any], Effect], answer: object) -> Effect:
        """The next effect of a role, which goes on with this answer."""
        self.resume(answer)
        with active(self):
            return send(answer)

    def carry_out(self, effect: Compute, took_s: float) -> Any:
        """The result of a task; `took_s`: seconds that it will have taken, where it is no gradient."""
        if effect.what != "gradient":
            return self.run(effect.what, effect.task, took_s)
        self.step(effect.step)
        return self.compute(effect.task)

    def run(self, what: str, task: Callable[[], Any], took_s: float = 0.0) -> Any:
        """Run a task that takes so much virtual time from now on; returns its result."""
        began_s = self.clock()
        with active(self):
            result = task()
        if self.recording:
            self.add(what, KINDS.get(what, OTHER), began_s, began_s + took_s)
        return result

    def compute(self, task: Callable[[], Any]) -> Any:
        """Run a gradient's task, which takes virtual time from now on; returns its result."""
        virtual_clock, num_before = self.clock, len(self.events)
        began_s = virtual_clock()
        with active(self):
            self.clock = time.perf_counter
            real_s = self.clock()
            try:
                result = task()
            finally:
                ended_s, self.clock = self.clock(), virtual_clock
        if self.recording:
            spans, self.events[num_before:] = self.events[num_before:], []
            self._computed = spans, real_s, ended_s, began_s
        return result

    def computed(self, took_s: float) -> None:
        """The gradient that takes `took_s` is there, or has been broken off."""
        if self._computed is None:
            return
        spans, real_s, real_end_s, began_s = self._computed
        self._computed, now_s = None, self.clock()
        scale = took_s / max(real_end_s - real_s, 1e-12)
        for one in spans:
            first, last = (
                min(now_s, began_s + (at_s - real_s) * scale) for at_s in (one.began_s, one.ended_s)
            )
            self.add(one.name, one.category, first, last, one.args)
        self.add("gradient", COMPUTE, began_s, now_s)

    def wait(self, what: str = "wait for a message", category: str = WAIT) -> None:
        """The rank waits from now on until it is resumed."""
        self._waits_since = self.clock() if self.recording else None
        self._waits_for = what, category

    def resume(self, answer: object) -> None:
        """The rank goes on with this answer."""
        if self._waits_since is not None:
            if self.recording and self.clock() > self._waits_since:
                self.add(*self._waits_for, self._waits_since, self.clock())
            self._waits_since = None
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Message):
            with active(self):
                for worker, push in pushes_of(*answer):
                    self.hear_push(worker, push.step)

    def sleep(self, seconds: float) -> None:
        """The rank sleeps from now on."""
        if self.recording:
            self.add("sleep", WAIT, self.clock(), self.clock() + seconds)

    def send(self, to: int, message: Message, sent_s: float, arrival_s: float) -> None:
        """A message has been sent, and arrives then."""
        self.fly(f"{type(message).__name__} to {to}", payload_bytes(message), sent_s, arrival_s)

    def fly(self, name: str, num_bytes: int, sent_s: float, arrival_s: float) -> None:
        """So many bytes are under way from then to then."""
        if self.recording:
            self.add(name, COMMUNICATION, sent_s, arrival_s, {"bytes": num_bytes}, next(self._numbers))
