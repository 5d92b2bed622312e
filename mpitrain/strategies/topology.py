"""Who talks to whom among peers, and with what weight: a pure function of (topology, rank, number, step).

    full         everybody; weight 1/N
    ring         the two next to each; 1/3
    torus        the four next to each on a grid of rows x columns (the most square one that fits); 1/5.
                 A prime number of peers makes a grid of one row, which is a ring
    exponential  at step t the one 2^(t mod ceil(log2 N)) ranks before: weight 1/2 (one-peer exponential graph:
                 Assran et al., ICML 2019; Ying et al., NeurIPS 2021: for N a power of two the mean is reached in
                 log2 N steps).
                 Static, where a peer has to keep track of the others: all that are 2^k ranks away, equal weights

Invariants: the matrix W of all rows is doubly stochastic at every step, so mixing x <- W x keeps the mean of x.
All but the one-peer graph are symmetric. On a ring |x - xbar| shrinks by (1 + 2 cos(2 pi/N))/3 a step.
"""

from __future__ import annotations

import functools
import math

from mpitrain.errors import UsageError
from mpitrain.values import nearest

TOPOLOGIES = ("full", "ring", "torus", "exponential")


def check_topology(name: str) -> None:
    """Raise `UsageError` for a name that is none."""
    if name not in TOPOLOGIES:
        raise UsageError(f"unknown topology {name!r}{nearest(name, list(TOPOLOGIES))}")


def mixing_weights(topology: str, rank: int, number: int, step: int | None = None) -> dict[int, float]:
    """Row `rank` of W among `number` peers: what each peer's parameters weigh, its own included, by rank. `step` None
    is the static graph.
    """
    assert 0 <= rank < number, (rank, number)
    if number == 1:
        return {rank: 1.0}
    if topology == "full":
        return dict.fromkeys(range(number), 1.0 / number)
    if topology == "exponential":
        if step is not None:
            return {rank: 0.5, (rank - _hop(number, step)) % number: 0.5}
        hops = [1 << k for k in range((number - 1).bit_length())]
        near = {(rank + sign * hop) % number for hop in hops for sign in (1, -1)}
        return _weighed(rank, sorted(near), 1.0 / (len(near) + 1))
    if topology == "ring":
        return _ring(rank, number)
    rows = _num_rows(number)
    if rows == 1:
        return _ring(rank, number)
    columns = number // rows
    row, column = divmod(rank, columns)
    near_on_grid = [
        (row + 1) % rows * columns + column, (row - 1) % rows * columns + column,
        row * columns + (column + 1) % columns, row * columns + (column - 1) % columns,
    ]  # fmt: skip
    return _weighed(rank, near_on_grid, 0.2)


def receivers(topology: str, rank: int, number: int, step: int | None = None) -> tuple[int, ...]:
    """Whom `rank` sends to: those in whose row it has a weight."""
    if topology == "exponential" and step is not None and number > 1:
        return ((rank + _hop(number, step)) % number,)
    return tuple(sorted(set(mixing_weights(topology, rank, number, step)) - {rank}))


def senders(topology: str, rank: int, number: int, step: int | None = None) -> tuple[int, ...]:
    """Whom `rank` hears from."""
    return tuple(sorted(set(mixing_weights(topology, rank, number, step)) - {rank}))


def contacts(topology: str, rank: int, number: int, static: bool) -> tuple[int, ...]:
    """Everybody whom `rank` exchanges anything with at some step, and its relatives in the tree of meetings."""
    steps = [None] if static or topology != "exponential" else range((number - 1).bit_length())
    near = {other for step in steps for other in receivers(topology, rank, number, step)}
    near |= {other for step in steps for other in senders(topology, rank, number, step)}
    return tuple(sorted(near | set(tree(rank, number))))


def parent(rank: int) -> int | None:
    """Whom a meeting's sums go to; None at the root."""
    return (rank - 1) // 2 if rank else None


def children(rank: int, number: int) -> tuple[int, ...]:
    """Whose sums come here: a binary tree over all peers, so that no link carries more than three models."""
    return tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < number)


def tree(rank: int, number: int) -> tuple[int, ...]:
    """Parent and children."""
    above = parent(rank)
    return (*([] if above is None else [above]), *children(rank, number))


@functools.lru_cache
def _num_rows(number: int) -> int:
    """Of the most square grid."""
    return next(rows for rows in range(math.isqrt(number), 0, -1) if number % rows == 0)


def _hop(number: int, step: int) -> int:
    return 1 << step % (number - 1).bit_length()


def _ring(rank: int, number: int) -> dict[int, float]:
    if number == 2:
        return {0: 0.5, 1: 0.5}
    return _weighed(rank, [(rank - 1) % number, (rank + 1) % number], 1.0 / 3.0)


def _weighed(rank: int, near: list[int], weight: float) -> dict[int, float]:
    """`weight` for each, counted twice where a peer is near twice, and the rest for oneself."""
    row = {rank: 1.0 - weight * sum(other != rank for other in near)}
    for other in near:
        if other != rank:
            row[other] = row.get(other, 0.0) + weight
    return row
