"""A module under torch's DistributedDataParallel, as every run here uses it.

Invariants: all ranks share the module already, so DDP sends nothing when it is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.compression import Codec, Uncompressed
from mpitrain.training.synchronous.codec_hooks import CodecHook, attach_codec


def codec_of(strategy: Any) -> Codec:
    """The codec of an allreduce; other strategies average gradients, if at all, in full."""
    return strategy.codec if isinstance(strategy, AllReduce) else Uncompressed()


def attach(parallel: DistributedDataParallel, codec: Codec, seed: int = 0) -> CodecHook | None:
    """The hook of a codec, or None where numbers travel as they are."""
    return None if codec.is_none else attach_codec(parallel, codec, seed=seed)


def data_parallel(module: nn.Module, group: Any = None, find_unused: bool = False) -> DistributedDataParallel:
    """DDP over `group` (default: all ranks) around a module that its ranks already share. Running statistics
    stay the validator's own: they are not used while training, so broadcasting them every step, torch's
    default, buys nothing. `find_unused`: the loss may leave parameters out."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers" in known  # in torch 2.13
    off: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        module,
        process_group=group,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **off,
    )


def weight_among_all(weight: float) -> float:
    """What makes the mean over all ranks of their losses' sums the sum of all over all their weights; collective, and
    every rank has to call it: all losses are weighted, or none is."""
    total = torch.tensor([weight], dtype=torch.float64)
    dist.all_reduce(total)
    return dist.get_world_size() / float(total) if total else 0.0
