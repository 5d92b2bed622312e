"""How long the k-th of n workers takes on the mean, by integration: nothing is drawn.

    E of the k-th of n  =  integral over x from 0 of I(S(x); n - k + 1, k)

S(x) is the chance that one worker takes longer than x, and I the regularised incomplete beta function: the chance that
at least n - k + 1 of n do (David and Nagaraja, Order Statistics, 2003). Invariants: the integral runs over log x, since
tails may be heavy, in panels that are halved until halving changes nothing, so that jumps are found, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpitrain.virtual.compute import ComputeLaw, Times

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
# what a value at each of these points adds to the polynomial through all at -1 and at 1
_TO_ENDS = np.linalg.inv(np.vander(_NODES)).T @ np.vander([-1.0, 1.0], len(_NODES)).T
_REACH = 700.0  # of log x: beyond it numbers overflow
_BELOW, _PANEL = 40.0, 0.5
_HALVINGS, _ERROR = 60, 1e-10


def kth_of(law: ComputeLaw, accepted: int, num_workers: int) -> float | None:
    """Mean of the `accepted`-th shortest of so many independent times; None where the law has no survival function, or
    the integral does not converge."""
    if law.survival(np.ones(1)) is None:
        return None
    above = num_workers - accepted + 1

    def survival(xs: Times) -> Times:
        found = law.survival(xs)
        assert found is not None
        return found

    def height(logs: Times) -> Times:
        xs = np.exp(logs)
        found: Times = xs * _beta(above, accepted, survival(xs))
        return found

    low, high = -_REACH, _REACH
    if float(height(np.array([low]))[0]) == 0.0:
        return 0.0  # nothing takes any time
    for _ in range(100):  # where half of the times are longer
        middle = (low + high) / 2
        low, high = (middle, high) if survival(np.exp(np.array([middle])))[0] > 0.5 else (low, middle)
    begin, end = low - _BELOW, low + 10
    total = math.exp(begin) + _integral(height, begin, end)
    while end < _REACH:
        more = _integral(height, end, end + 10)
        total, end = total + more, end + 10
        if more <= _ERROR * total:
            return total
    return None


def _integral(height: Callable[[Times], Times], begin: float, end: float) -> float:
    edges = np.linspace(begin, end, math.ceil((end - begin) / _PANEL) + 1)
    lows, highs, done = edges[:-1], edges[1:], 0.0
    whole = _panels(height, lows, highs)
    for _ in range(_HALVINGS):
        middles = (lows + highs) / 2
        left, right = _panels(height, lows, middles), _panels(height, middles, highs)
        change = np.abs(left + right - whole) + _misfits(height, lows, highs)
        rough = change > _ERROR * max(done + float(whole.sum()), 1e-300) / 100
        done += float((left + right)[~rough].sum())
        if not rough.any():
            return done
        lows, highs = (
            np.concatenate([lows[rough], middles[rough]]),
            np.concatenate([middles[rough], highs[rough]]),
        )
        whole = np.concatenate([left[rough], right[rough]])
    return done + float(whole.sum())


def _panels(height: Callable[[Times], Times], lows: Times, highs: Times) -> Times:
    """The integral over each panel, by Gauss's eight points."""
    half = (highs - lows) / 2
    points = lows[:, None] + half[:, None] * (1 + _NODES)
    found: Times = half * (height(points.ravel()).reshape(points.shape) @ _WEIGHTS)
    return found


def _misfits(height: Callable[[Times], Times], lows: Times, highs: Times) -> Times:
    """How far a polynomial through each panel's points is from its ends, times the width: a jump may lie behind the
    last point of the panel and of its halves."""
    half = (highs - lows) / 2
    points = lows[:, None] + half[:, None] * (1 + _NODES)
    seen = height(points.ravel()).reshape(points.shape) @ _TO_ENDS
    ends = height(np.stack([lows, highs], axis=1).ravel()).reshape(-1, 2)
    found: Times = half * np.abs(seen - ends).max(axis=1)
    return found


def _beta(a: int, b: int, x: Times) -> Times:
    """I(x; a, b), by Lentz's continued fraction on the side of the mode where it converges fast."""
    swapped = x > (a + 1) / (a + b + 2)
    first, second = np.where(swapped, b, a), np.where(swapped, a, b)
    inside = np.clip(np.where(swapped, 1 - x, x), 1e-300, 1.0)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    rest = np.where(swapped, np.log(np.clip(x, 1e-300, 1)), np.log1p(-np.clip(x, 0, 1 - 1e-16)))
    front = np.exp(scale + first * np.log(inside) + second * rest) / first
    tail = np.clip(front * _fraction(first, second, inside), 0, 1)
    found: Times = np.where(swapped, 1 - tail, tail)
    return np.where(x <= 0, 0.0, found)


def _fraction(a: Times, b: Times, x: Times) -> Times:
    tiny = 1e-300
    c = np.ones_like(x)
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / np.where(np.abs(d) < tiny, tiny, d)
    found = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 + term * d, 1 + term / c
            d, c = 1 / np.where(np.abs(d) < tiny, tiny, d), np.where(np.abs(c) < tiny, tiny, c)
            found = found * d * c
        if np.max(np.abs(d * c - 1)) < 1e-14:
            break
    return found
