"""Synchronous data parallelism without a server: w <- w - eta * mean over all workers of g_i.

The work is torch's own DistributedDataParallel over our process group, so this value only names it; there is
nothing to decide.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from mpitrain.codecs.base import Codec
from mpitrain.codecs.none import Uncompressed
from mpitrain.strategies.base import Strategy
from mpitrain.values import register


@register("strategy", "allreduce")
class AllReduce(Strategy):
    """Every rank is a worker; gradients are averaged by torch's DDP over MPI, while backward still runs.

    Li et al., "PyTorch Distributed", VLDB 2020.

    Args:
        codec: what travels in place of the gradients.
    """

    all_reduces: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True
    wire_fields: ClassVar[tuple[str, ...]] = ("codec",)
    needs_all = False

    codec: Codec = field(default=Uncompressed(), metadata={"kind": "codec"})

    @property
    def clips_mean(self) -> bool:
        return self.codec.is_none
