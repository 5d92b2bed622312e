"""An exponential moving average of parameters, beside those that are trained.

Invariants: it counts as torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update copies, every
later one is average = decay * average + (1 - decay) * parameters. Of parameters in 16 bits, which would not hold what
an update adds, the average is in 32. It never changes the parameters, but for as long as they are swapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpitrain.model.copies import copied
from mpitrain.model.wire.masters import wide

Averaged = Callable[[], AbstractContextManager[Any]]  # for as long as it lasts a module holds its average


class Ema:
    """The average of some tensors.

    Args:
        decay: in [0, 1).
        held: the tensors now, where their numbers lie; always as many, of the same shapes.
    """

    def __init__(self, decay: float, held: Callable[[], Sequence[torch.Tensor]]):
        self.decay, self.held = decay, held
        self._averages: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """The tensors have been updated."""
        now = [wide(tensor.detach()) for tensor in self.held()]
        if not self._averages:
            self._averages = [tensor.clone() for tensor in now]
        elif now:
            torch._foreach_lerp_(self._averages, now, 1 - self.decay)

    def values(self) -> list[torch.Tensor]:
        """The averages; before the first update the tensors themselves."""
        return self._averages or [tensor.detach() for tensor in self.held()]

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """For as long as the context lasts the tensors hold the averages."""
        now = [tensor.detach() for tensor in self.held()]
        before = [tensor.clone() for tensor in now]
        with torch.no_grad():
            for tensor, average in zip(now, self.values(), strict=True):
                tensor.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, own in zip(now, before, strict=True):
                    tensor.copy_(own)

    def state(self) -> list[torch.Tensor]:
        """The averages, copied; empty before the first update."""
        averages: list[torch.Tensor] = copied(self._averages)
        return averages

    def restore(self, saved: Any) -> None:
        """Continue from what `state` returned; without anything it begins with the next update."""
        pairs = zip(saved or (), self.held(), strict=False)
        self._averages = [average.clone().to(tensor.device) for average, tensor in pairs]


def ema_of(decay: float | None, held: Callable[[], Sequence[torch.Tensor]]) -> Ema | None:
    """The average that a job asks for; None where it asks for none."""
    return None if decay is None else Ema(decay, held)
