"""What a job's loss returns: its mean over the batch, or (sum, weight) for a mean of another kind.

Invariants: where the loss divides by something else than samples (class weights, tokens that count), only the
sum and what to divide it by can be put together over ranks; a mean that each rank has taken for itself cannot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mpitrain.errors import UsageError


class BatchLoss(NamedTuple):
    """`total` / `weight`, or, where `weight` is None, a mean over samples."""

    total: torch.Tensor
    weight: float | None

    @property
    def mean(self) -> torch.Tensor:
        """Over this batch; 0 where nothing of it counts."""
        if self.weight is None:
            return self.total
        return self.total / self.weight if self.weight else self.total * 0.0


def read_loss(returned: Any) -> BatchLoss:
    """What a loss has returned.

    Raises:
        UsageError: a tuple that is not (sum, weight), or a weight that is negative or no number.
    """
    if not isinstance(returned, tuple):
        return BatchLoss(returned, None)
    if len(returned) != 2:
        raise UsageError(
            f"the loss returned a tuple of {len(returned)}: return the mean over the batch, or (sum, weight) for the "
            "mean sum / weight"
        )
    total, divisor = returned
    try:
        weight = float(divisor)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            "the loss returned (sum, weight), and the weight is no number but "
            f"{_described(divisor)}: it is what the sum is divided by"
        ) from None
    if weight < 0:
        raise UsageError(
            f"the loss returned (sum, weight) with the weight {weight:g}: it must not be negative"
        )
    return BatchLoss(total, weight)


def _described(value: object) -> str:
    """What a function has returned, in few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, str | bool | int | float) else type(value).__name__


class Tally:
    """Means over many batches: a loss by what it divides by, anything else by samples."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name: sum, what to divide it by

    def add(self, name: str, returned: object, num_samples: int) -> None:
        """One batch's mean, or (sum, weight)."""
        loss = read_loss(returned)
        weight = float(num_samples) if loss.weight is None else loss.weight
        self.merge({name: [float(loss.total) * (num_samples if loss.weight is None else 1), weight]})

    def merge(self, sums: dict[str, list[float]]) -> None:
        """What another has added up."""
        for name, (total, weight) in sums.items():
            held = self.sums.setdefault(name, [0.0, 0.0])
            held[0], held[1] = held[0] + total, held[1] + weight

    def means(self) -> dict[str, float]:
        """Of everything; NaN where nothing counted."""
        return {
            name: total / weight if weight else float("nan") for name, (total, weight) in self.sums.items()
        }
