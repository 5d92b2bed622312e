"""Data parallelism whose ranks hold only a share of parameters, gradients and optimizer state.

    forward, backward: allgather the layer's parameters; after backward: reduce-scatter the mean gradient

Every rank takes its own batch, as in `allreduce`, and the update is the same; what changes is memory, 1/N of the
model's per rank, for half as many bytes again (Rajbhandari et al., "ZeRO", SC 2020, stage 3; Zhao et al., "PyTorch
FSDP", VLDB 2023). With replicas, parameters travel within a replica only (on one node, where it fits) and
gradients are averaged across replicas.
"""

from __future__ import annotations

from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.values import register


@register("strategy", "sharded")
class Sharded(Split):
    """Parameters, gradients and optimizer state are shared out over all ranks (torch's FSDP2).

    Zhao et al., "PyTorch FSDP", VLDB 2023.

    Args:
        replicas: whole copies of the model; each is shared out over 1/replicas of the ranks.
    """

    gathers_layers: ClassVar[bool] = True

    replicas: int = 1

    def check(self) -> None:
        self.hold("replicas", self.replicas >= 1, "must be at least 1")

    def num_parts(self, num_ranks: int) -> int:
        return max(1, num_ranks // self.replicas)

    def num_replicas(self, num_workers: int) -> int:
        return num_workers

    def check_workers(self, num_workers: int) -> None:
        if num_workers % self.replicas:
            raise UsageError(
                f"{self}: {num_workers} rank(s) cannot be divided into {self.replicas} replicas: start a multiple "
                f"of {self.replicas}"
            )
