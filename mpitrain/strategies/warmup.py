"""Warm-up on few replicas: at first some workers train alone, then the others join from their parameters.

The remedy of Downpour SGD against the chaos of the first epochs (Dean et al. 2012), and of the async systems
after it. It is counted in the samples of the pushes that have arrived, dropped ones too: so its length means
the same for every strategy and number of workers, and all shards of a model end it with the same pushes. (Counted
in accepted samples, one shard could wait for workers that another does not let in yet.)
"""

from __future__ import annotations

from mpitrain.errors import UsageError
from mpitrain.values import Value, register


@register("warmup", "warmup")
class Warmup(Value):
    """`workers` replicas train alone for `epochs` epochs of samples; 0 epochs is no warm-up."""

    workers: int = 1
    epochs: float = 0.0

    def check(self) -> None:
        if self.workers < 1 or not 0 <= self.epochs < float("inf"):
            raise UsageError(
                f"warmup: needs workers >= 1 and epochs >= 0, got {self.workers} and {self.epochs}"
            )

    def first(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Who takes part from the start."""
        return workers[: self.workers] if self.epochs else workers

    def is_over(self, num_pushed: int, num_samples: int) -> bool:
        """Whether `num_pushed` samples end the warm-up, an epoch having `num_samples`."""
        return num_pushed >= self.epochs * num_samples
