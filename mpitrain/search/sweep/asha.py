"""Asynchronous successive halving: which setting goes on training, and which new one begins.

After Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), algorithm 2. Rungs are amounts of
training, each `reduction` times the one below. Whoever is free asks, and nobody waits for a whole rung: the best
1/reduction of those that have come to a rung so far go on to the next.

Invariants: a pure function of what has been measured; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from mpitrain.errors import UsageError
from mpitrain.reporting.targets import Choice
from mpitrain.values import Value, register

RULE_KIND = "early stopping"


@register(RULE_KIND, "asha")
class Asha(Value):
    """The best 1/reduction of the settings that have trained for `least` epochs go on to reduction x least, and
    so on; those of the last rung are trained to their end."""

    least: int = 1
    reduction: int = 3

    def check(self) -> None:
        self.hold("least", self.least >= 1, "must be at least 1 epoch")
        self.hold("reduction", self.reduction >= 2, "must be at least 2")

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Epochs of each rung; the last one is the whole training.

        Raises:
            UsageError: the training ends at the first rung, so nothing could be stopped.
        """
        if epochs <= self.least:
            raise UsageError(
                f"{self}: the first rung is {self.least} epoch{'s' * (self.least > 1)}, and a run has {epochs}; give a "
                "smaller least=, or more epochs"
            )
        found, rung = [], self.least
        while rung < epochs:
            found.append(rung)
            rung *= self.reduction
        return (*found, epochs)


Measured = Sequence[
    Mapping[int, float | None]
]  # of each rung: what each setting has reached; None: it failed


def promotable(
    measured: Measured, begun: Sequence[Collection[int]], by: Choice, reduction: int
) -> tuple[int, int] | None:
    """The setting that goes on next, with the rung that it goes on to; None where none does.

    Args:
        measured: of each rung, by setting.
        begun: of each rung, who trains for it or has done so.
    """
    for rung in range(len(measured) - 2, -1, -1):
        values = measured[rung]
        ranked = sorted(values, key=lambda index: (_worth(values[index], by), index))
        for index in ranked[: len(values) // reduction]:
            if index not in begun[rung + 1] and _worth(values[index], by) < math.inf:
                return index, rung + 1
    return None


def _worth(value: float | None, by: Choice) -> float:
    """Smaller is better; what failed or diverged comes last."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if by.less_is_better else -value
