"""What a speed-up curve is limited by: Gunther's universal scalability law, fitted.

Invariants: arithmetic on points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class SerialFraction(NamedTuple):
    """S(N) = N / (1 + sigma (N - 1) + kappa N (N - 1)); `worst`: largest relative error of the fit."""

    sigma: float
    kappa: float
    worst: float


def fit_serial_fraction(points: Sequence[tuple[int, float]]) -> SerialFraction | None:
    """Least squares of N/S - 1 = sigma (N - 1) + kappa N (N - 1), relative to N, over (N, S) with N > 1; kappa is 0
    where there are fewer than three such points or where it would be negative. None without any."""
    used = [(float(number), number / speed_up - 1) for number, speed_up in points if number > 1]
    if not used:
        return None
    rows = [((number - 1) / number, number - 1, excess / number) for number, excess in used]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    sigma, kappa = ay / aa, 0.0
    if len(rows) > 2 and determinant > 1e-12 * aa * bb:
        both = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
        if both[1] > 0:
            sigma, kappa = both
    errors = [
        abs((1 + excess) / max(1e-12, 1 + sigma * (number - 1) + kappa * number * (number - 1)) - 1)
        for number, excess in used
    ]
    return SerialFraction(sigma, kappa, max(errors))


def limit(fit: SerialFraction) -> tuple[float, float]:
    """(the most that a speed-up comes to, the number of workers where it does): of the fitted curve.

    Without kappa it nears 1 / sigma and never gets there; with neither there is no limit."""
    sigma, kappa = max(0.0, fit.sigma), fit.kappa
    if kappa > 0:
        number = math.sqrt(max(1.0, (1 - sigma) / kappa))
        return number / (1 + sigma * (number - 1) + kappa * number * (number - 1)), number
    return (1 / sigma if sigma else math.inf), math.inf
