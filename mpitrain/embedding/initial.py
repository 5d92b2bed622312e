"""The first values of rows, each a function of (seed, table, id) alone: no server draws what nobody has asked for, and
any number of servers draws the same.

    x = splitmix64(key + (number of the value in the table) * odd constant),   u = x / 2^64 in [0, 1)
    "uniform"   scale (2 u - 1)
    "normal"    scale sqrt(-2 log(1 - u)) cos(2 pi u')     (Box and Muller 1958; u' from a second key)

Invariants: computed in float64 and rounded once, so machines agree but for the last bit of a logarithm or a cosine.
Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, is the source of the mixing.
"""

from __future__ import annotations

import hashlib

import numpy as np

LAWS = ("normal", "uniform", "zeros")


def key_of(seed: int, table: str) -> int:
    """Of one table in a run of this seed."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def initial_rows(law: str, scale: float, key: int, ids: np.ndarray, width: int) -> np.ndarray:
    """Rows of shape (len(ids), width), float64."""
    if law == "zeros":
        return np.zeros((len(ids), width))
    numbers = ids.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    first = _uniform(numbers, key)
    if law == "uniform":
        return np.asarray(scale * (2.0 * first - 1.0))
    second = _uniform(numbers, key ^ 0xD1B54A32D192ED03)
    return np.asarray(scale * np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second))


def _uniform(numbers: np.ndarray, key: int) -> np.ndarray:
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
