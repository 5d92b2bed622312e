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


class CheckpointPolicy(NamedTuple):
    """One of: every `samples` accepted samples, every `seconds`, `auto` (with `mtbf_s`), or never."""

    samples: int = 0
    seconds: float = 0.0
    auto: bool = False
    mtbf_s: float = 86400.0

    def interval_s(self, cost_s: float | None) -> float:
        """Seconds between two checkpoints; infinite where samples are counted instead."""
        if self.seconds:
            return self.seconds
        if not self.auto:
            return math.inf
        return FIRST_AUTO_S if cost_s is None else max(LEAST_AUTO_S, math.sqrt(2 * cost_s * self.mtbf_s))

    def next_mark(self, samples: int) -> int:
        """The next multiple of the interval above `samples`; 0 where time is counted."""
        return (samples // self.samples + 1) * self.samples if self.samples else 0


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
