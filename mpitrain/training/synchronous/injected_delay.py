"""Injected delays and faults of a synchronous run: it sleeps, fails, or has a bit flipped, after its own step.

Invariants: a delay is relative to the rank's own time, from the forward pass to its last gradient. The whole backward
pass also waits for the others, so a delay relative to it would pass one rank's sleep on to the next, and the delays of
two slow ranks would feed each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import nn

from mpitrain.inject import Straggler
from mpitrain.training.synchronous.flips import Flips


class InjectedDelay:
    """Sleeps after each step as the injections say; does nothing where nothing is injected.

    Args:
        straggler: what is injected into this worker.
        parameters: the model's; the last one to get its gradient ends the rank's own time.
        fail: carries out a fault.

    Attributes:
        flips: flips the bits.
    """

    flips: Flips | None = None

    def __init__(
        self,
        straggler: Straggler,
        parameters: Iterable[nn.Parameter],
        fail: Callable[[str, float], None],
    ):
        self.straggler, self.fail = straggler, fail
        self._began_s = self._ready_s = time.monotonic()
        if straggler.is_ordered:
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _parameter: object) -> None:
        self._ready_s = time.monotonic()

    def begin(self) -> None:
        """The forward pass begins."""
        self._began_s = time.monotonic()

    def sleep_after_step(self) -> float:
        """Sleep; returns the seconds. The communication thread goes on meanwhile."""
        if not self.straggler.is_ordered:
            return 0.0
        step = self.straggler.step
        seconds = self.straggler.sleep_s(max(0.0, self._ready_s - self._began_s))
        for fault in self.straggler.breaks(step):
            self.fail(fault.how, fault.after_s)
        for flip in self.straggler.flips(step):
            assert self.flips is not None
            self.flips.carry_out(flip)
        if seconds > 0:
            time.sleep(seconds)
        return seconds
