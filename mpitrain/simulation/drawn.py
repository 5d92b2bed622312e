"""Faults at a rate in virtual time, of workers that the others go on without.

Invariants: the course is that of a real run of the same seeds and kinds; it counts virtual seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpitrain.errors import UsageError
from mpitrain.inject import Due, Injection, Straggler, orders_among
from mpitrain.inject.drawn import course, of_worker
from mpitrain.strategies.base import Strategy

DEATHS = ("kill", "segv", "raise")


def draw(
    stragglers: Sequence[Straggler], injections: Sequence[Injection], strategy: Strategy, seed: int,
    age_s: Callable[[], float],
) -> None:  # fmt: skip
    """Have each worker hit by what falls to it.

    Raises:
        UsageError: a death would end the whole job, or a checkpoint is to be damaged.
    """
    orders = orders_among(injections)
    for order in orders:
        if not strategy.has_servers or strategy.needs_all:
            raise UsageError(
                f'--inject "{order}": in virtual time it hits workers that others go on without, and {strategy} ends '
                f'with any of them: order "crash(mtbf_s={order.mtbf_s:g})" and --costs "costs(restart_s=...)"'
            )
        if other := set(order.asked) - {*DEATHS, "exit", "stop", "wedge", "nan"}:
            raise UsageError(
                f'--inject "{order}": {", ".join(sorted(other))} is drawn in real runs only (mpitrain train)'
            )
    if orders:
        for one in stragglers:
            courses = [course(order, seed, DEATHS, len(stragglers)) for order in orders]
            one.drawn = Due(courses, age_s, of_worker(one.worker))
