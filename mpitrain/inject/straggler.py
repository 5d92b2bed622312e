"""What is ordered for one worker, carried out between its role and its world.

Invariants: every effect of the role passes through unchanged, and the role does not notice.
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain.effects import Break, Compute, Effect, Interrupted, Now, Role, Sleep, replaced
from mpitrain.inject.drawn import Due
from mpitrain.inject.values import AtWorker, Fault, Flip, Injection, Kill, KillAtEnd, Nan, SlowReader


class Straggler:
    """What is ordered for one worker, and what has come of it.

    Args:
        injections: everybody's; those of other workers are ignored.
        worker: this worker's index.
        seed: the run's.
        drawn: what is drawn for this worker.
    """

    def __init__(self, injections: tuple[Injection, ...], worker: int, seed: int, drawn: Due | None = None):
        mine = tuple(one for one in injections if isinstance(one, AtWorker) and one.worker == worker)
        self.injections, self.faults = mine, tuple(one for one in mine if isinstance(one, Fault))
        self.last_order = tuple(one for one in mine if isinstance(one, KillAtEnd))
        self.ended_by: list[str] = []
        self.worker, self.seed, self.drawn = worker, seed, drawn
        self.step = self.sleeps = 0
        self.slept_s = 0.0

    @property
    def is_ordered(self) -> bool:
        """Whether anything may happen to this worker."""
        return bool(self.injections or self.drawn)

    def sleep_s(self, compute_s: float) -> float:
        """One gradient more, which took `compute_s`: seconds to sleep now, counted as slept."""
        seconds = sum(one.sleep_s(self.step, compute_s, self.seed) for one in self.injections)
        self.step += 1
        self.sleeps += seconds > 0
        self.slept_s += seconds
        return seconds

    def breaks(self, step: int) -> list[Break]:
        """What is to break after gradient number `step`; ask once. Of "nan" this gradient is not finite."""
        due = [one for one in self.faults if one.at_step == step and not isinstance(one, Flip)]
        drawn = self.drawn.take() if self.drawn else []
        ordered = [Break(one.name, one.after_s if isinstance(one, Kill) else 0.0) for one in due]
        return [*ordered, *map(Break, drawn)]

    def flips(self, step: int) -> list[Flip]:
        """The bits that are to flip after gradient number `step`."""
        return [one for one in self.faults if isinstance(one, Flip) and one.at_step == step]

    def wrap(self, role: Role) -> Role:
        """The role, its gradients followed by the sleeps and faults; the role itself if nothing is ordered."""
        return self._wrapped(role) if self.is_ordered else role

    def _wrapped(self, role: Role) -> Role:
        late_s = sum(one.seconds for one in self.injections if isinstance(one, SlowReader))
        if late_s:
            yield Break("slow_reader", late_s)
        return (yield from replaced(role, self._answer_to))

    def _answer_to(self, effect: Effect) -> Role:
        if isinstance(effect, Compute) and effect.what == "deliver" and self.last_order:
            self.ended_by = [one.name for one in self.last_order]
            yield Break("kill")
        if not (isinstance(effect, Compute) and effect.what == "gradient"):
            return (yield effect)
        began_s = yield Now()
        answer = yield effect
        if answer is None or isinstance(answer, Interrupted):
            return answer
        step = self.step
        seconds = self.sleep_s((yield Now()) - began_s)
        for order in self.breaks(step):
            if order.how == Nan.name:
                answer = answer._replace(loss=math.nan, finite=False)
            else:
                yield order
        if seconds > 0 and (broken_off := (yield Sleep(seconds, effect.interruptible))) is not None:
            return broken_off  # the gradient was not finished yet, as far as its role knows
        return answer

    def counts(self) -> list[dict[str, Any]]:
        """For `result.json`: how often and how long this worker slept; empty if nothing was ordered."""
        row: dict[str, Any] = {"worker": self.worker, "sleeps": self.sleeps, "slept_s": self.slept_s}
        if self.faults or self.last_order or self.drawn:
            ordered = [one.name for one in self.faults if one.at_step < self.step]
            row["faults"] = ordered + (self.drawn.taken if self.drawn else []) + self.ended_by
        return [row] if self.is_ordered else []

    def state(self) -> dict[str, Any]:
        """Where the worker is, JSON-able."""
        return {"step": self.step, "sleeps": self.sleeps, "slept_s": self.slept_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.step, self.sleeps, self.slept_s = state["step"], state["sleeps"], state["slept_s"]
