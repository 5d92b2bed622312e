"""How often to write a checkpoint.

Invariants: pure arithmetic. `auto` is the interval that loses least time to writing and to work done twice:
sqrt(2 C M) for a checkpoint that costs C seconds and a mean time between failures of M (Young, CACM 1974; Daly, FGCS
2006, first order).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from mpitrain.errors import UsageError

LEAST_AUTO_S = 5.0
FIRST_AUTO_S = 30.0  # until the cost has been measured
ASK_EVERY_S = 0.5
MOST_STEPS = 1000


class CheckpointPolicy(NamedTuple):
    """One of: every `samples` accepted samples, every `seconds`, `auto` (with `mtbf_s`), or never."""

    samples: int = 0
    seconds: float = 0.0
    auto: bool = False
    mtbf_s: float = 86400.0

    @property
    def is_never(self) -> bool:
        """Whether nothing is to be written."""
        return not (self.samples or self.seconds or self.auto)

    def interval_s(self, cost_s: float | None) -> float:
        """Seconds between two checkpoints; infinite where samples are counted instead."""
        if self.seconds:
            return self.seconds
        if not self.auto:
            return math.inf
        return FIRST_AUTO_S if cost_s is None else max(LEAST_AUTO_S, math.sqrt(2 * cost_s * self.mtbf_s))

    def next_checkpoint_at(self, samples: int) -> int:
        """The next multiple of the interval above `samples`; 0 where time is counted."""
        return (samples // self.samples + 1) * self.samples if self.samples else 0


class Cadence:
    """When ranks that take the same steps write a checkpoint together.

    A number of samples is known to every rank without a message. What one rank alone knows (it was asked to end, the
    time is up) the ranks have to ask one another, which they do about twice a second, counted in steps.

    Args:
        samples: accepted samples from which the run goes on.
    """

    def __init__(self, policy: CheckpointPolicy, samples: int = 0):
        self.policy = policy
        self.checkpoint_at = policy.next_checkpoint_at(samples)
        self.ask_at = 0  # the step after which the ranks ask one another next
        self._asked_at: int | None = None

    def go_on_from(self, samples: int) -> None:
        """A checkpoint was written at `samples`, or the run goes on from there."""
        self.checkpoint_at = self.policy.next_checkpoint_at(samples)

    def is_due(self, samples: int) -> bool:
        """Whether so many samples call for a checkpoint."""
        return 0 < self.checkpoint_at <= samples

    def steps_to_next_question(self, step: int, since_s: float, now_s: float) -> int:
        """In how many steps to ask again, when the ranks ask after `step`.

        Args:
            since_s: when the last question was answered, or the run began.
        """
        num_steps = 1 if self._asked_at is None else max(1, step - self._asked_at)
        self._asked_at = step
        per_step_s = max(1e-6, (now_s - since_s) / num_steps)
        return max(1, min(MOST_STEPS, int(ASK_EVERY_S / per_step_s)))


def read_policy(text: str, mtbf_s: float = 86400.0) -> CheckpointPolicy:
    """`"5000"` or `"5000 samples"`, `"60s"`, `"auto"`; `""` is never.

    Raises:
        UsageError: anything else.
    """
    text = text.strip()
    if text in ("", "never"):
        return CheckpointPolicy()
    if text == "auto":
        if not 0 < mtbf_s < math.inf:
            raise UsageError(f"mtbf_s must be finite and above 0, got {mtbf_s}")
        return CheckpointPolicy(auto=True, mtbf_s=mtbf_s)
    if match := re.fullmatch(r"(\d+)( ?samples)?", text):
        if int(match[1]):
            return CheckpointPolicy(samples=int(match[1]))
    elif (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?s", text)) and float(match[1]):
        return CheckpointPolicy(seconds=float(match[1]))
    raise UsageError(
        f'checkpoint_every={text!r}: expected samples such as "5000", seconds such as "60s", "auto" or "never"'
    )
