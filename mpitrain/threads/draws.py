"""Random numbers of replicas that share a process.

Torch has one generator on the host for all threads, so two replicas that seed it and draw at the same time would get
each other's numbers.

Invariants: what a replica draws depends on its own seed alone. A replica's first gradient is computed while no other
draws; if it has drawn, so are all of them, one replica after another. A model that draws nothing pays for its first
gradient only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpitrain.system.draws import LOCK


class Draws:
    """Of all replicas of one run.

    Attributes:
        drawn: whether a replica has drawn random numbers in a gradient.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def own(self, rank: int, take_turn: Callable[[], None]) -> Iterator[None]:
        """For as long as replica `rank` computes a gradient; `take_turn` waits for the lock, and holds it."""
        if rank in self._seen and not self.drawn:
            yield
            return
        take_turn()
        try:
            generators = _generators()
            before = [one.get_state() for one in generators]
            yield
            self._seen.add(rank)
            self.drawn = self.drawn or any(map(_has_drawn, generators, before))
        finally:
            LOCK.release()


def _generators() -> list[Any]:
    """The host's, and that of the device of this thread."""
    found: list[Any] = [torch.default_generator]
    if torch.cuda.is_available():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _has_drawn(generator: Any, before: torch.Tensor) -> bool:
    """Whether anything was drawn since the state `before`, or since the seed was set after that."""
    now = generator.get_state()
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
    return not torch.equal(now, before) and not torch.equal(now, seeded)
