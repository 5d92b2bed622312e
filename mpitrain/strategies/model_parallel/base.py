"""Strategies that spread one model over several ranks, and replicas of it over the rest.

Invariants: a split strategy only says how many ranks hold one model, which of them talk most and how many
batches a step takes; torch's pipelining, tensor parallel and FSDP2 do the work over our process group. All are
synchronous: w <- w - eta * mean of the gradients of all batches of the step, as one process with the whole
batch makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.model_parallel.mesh_layout import Grid, arrange


@dataclass(frozen=True, repr=False)
class Split(Strategy):
    """Base of the model-parallel strategies."""

    splits_model: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True

    def num_parts(self, num_ranks: int) -> int:
        """Ranks that hold one model together, out of `num_ranks`."""
        raise NotImplementedError

    @property
    def clips_mean(self) -> bool:
        return True

    def sits_together(self) -> str:
        """What is kept on one node: "parts" of one model, or "replicas" of one part."""
        return "parts"

    def num_replicas(self, num_workers: int) -> int:
        return num_workers // self.num_parts(num_workers)

    def check_workers(self, num_workers: int) -> None:
        parts = self.num_parts(num_workers)
        if parts > num_workers or num_workers % parts:
            raise UsageError(
                f"{self}: {num_workers} rank(s) cannot be divided into models of {parts} ranks: start a multiple "
                f"of {parts}"
            )

    def grid(self, nodes: tuple[int, ...]) -> Grid:
        """Everybody's place."""
        self.check_workers(len(nodes))
        return arrange(nodes, self.num_parts(len(nodes)), self.sits_together())
