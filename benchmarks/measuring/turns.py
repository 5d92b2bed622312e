"""Contestants that take turns in small blocks of steps, so that drift of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]


def take_turns(
    contestants: Mapping[str, Call | None],
    rounds: int,
    steps: int | Mapping[str, int],
    *,
    ready: Call,
    counted: Call | None = None,
    done: Call | None = None,
    num_warm_up: int = 1,
    alternates: bool = False,
) -> dict[str, list[float]]:
    """Seconds a step of each contestant, of every round; the values of one place were taken in the same round.

    Args:
        contestants: what makes one step; `None` takes no part here, and waits with the others.
        rounds: how often each has its turn and is counted.
        steps: in a turn, of all or of each.
        ready: called before the clock starts, in order that all ranks start at once.
        counted: called before it stops.
        done: called after it.
        num_warm_up: rounds before those that count.
        alternates: whether every other round goes through them backwards.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-num_warm_up, rounds):
        for name in [*contestants][:: -1 if alternates and number % 2 else 1]:
            step, num_steps = contestants[name], steps if isinstance(steps, int) else steps[name]
            ready()
            began_s = time.perf_counter()
            for _ in range(num_steps if step else 0):
                step()
            if counted:
                counted()
            if number >= 0:
                seconds[name].append((time.perf_counter() - began_s) / num_steps)
            if done:
                done()
    return seconds
