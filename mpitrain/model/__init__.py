"""The model as one flat vector: shards for servers, a replica for workers, and buffers that can travel."""

from mpitrain.model.assemble import flat_model, shard_store
from mpitrain.model.flat import FlatModel, Layout
from mpitrain.model.frame import Frame, FramePool
from mpitrain.model.optimizer import check_elementwise, rebuild
from mpitrain.model.replica import Gradient, Replica
from mpitrain.model.shard import ShardStore

__all__ = [
    "FlatModel", "Frame", "FramePool", "Gradient", "Layout", "Replica", "ShardStore",
    "check_elementwise", "flat_model", "rebuild", "shard_store",
]  # fmt: skip
