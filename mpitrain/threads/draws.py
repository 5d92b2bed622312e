"""Random numbers of replicas that share a process.

Torch has one generator on the host for all threads, so two replicas that seed it and draw at the same time would get
each other's numbers.

Invariants: what a replica draws depends on its own seed alone. A replica's first gradient is computed while no other
draws; if it has drawn, so are all of them, one replica after another. A model that draws nothing pays for its first
gradient only. One that begins later does so from the step on at which a layer of torch's has got a share to drop; what
draws unannounced is seen afterwards, and told, for the numbers of that step may be another replica's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mpitrain.devices.draws import generators
from mpitrain.system.draws import LOCK
from mpitrain.system.saying import tell
from mpitrain.torch_versions import AnyDropout


class Draws:
    """Of all replicas of one run.

    Attributes:
        drawn: whether a replica has drawn random numbers in a gradient, or is about to.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._seen: set[int] = set()
        self._layers: list[Any] = []

    def watch(self, module: nn.Module) -> None:
        """A replica's module, before its first gradient: its layers that draw, if they are told to."""
        self._layers += [layer for layer in module.modules() if _share(layer) is not None]

    @contextlib.contextmanager
    def own(self, rank: int, take_turn: Callable[[], None]) -> Iterator[None]:
        """For as long as replica `rank` computes a gradient; `take_turn` waits for the lock, and holds it."""
        if rank in self._seen and not self.drawn:
            self.drawn = any(map(_share, self._layers))
        if rank in self._seen and not self.drawn:
            yield
            self._look(rank)
            return
        take_turn()
        try:
            drawn_from = generators()
            before = [one.get_state() for one in drawn_from]
            yield
            self._seen.add(rank)
            self.drawn = self.drawn or any(map(_has_drawn, drawn_from, before))
        finally:
            LOCK.release()

    def _look(self, rank: int) -> None:
        """After a gradient that was computed beside others."""
        with LOCK:
            if self.drawn or not any(map(_has_drawn, generators())):
                return
            self.drawn = True
        tell(
            f"mpitrain: warning: random numbers were drawn while the gradient of rank {rank} was computed, and none in "
            "the first gradients: those of this step may be another replica's. From here on replicas compute one after "
            "another; a model that draws in its first step, too, has its own numbers from the start"
        )


def _share(layer: nn.Module) -> float | None:
    """Of what the layer drops, or otherwise changes at random, in training; None of a layer that never does."""
    if isinstance(layer, nn.RReLU):
        return float(layer.upper - layer.lower)
    if isinstance(layer, AnyDropout):
        return float(layer.p)
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return float(layer.dropout)
    return None


def _has_drawn(generator: Any, before: torch.Tensor | None = None) -> bool:
    """Whether anything was drawn since the state `before`, or since the seed was set after that."""
    now = generator.get_state()
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
    return not (before is not None and torch.equal(now, before)) and not torch.equal(now, seeded)
