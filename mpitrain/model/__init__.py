"""The model as one flat vector: shards for servers, a replica for workers, and buffers that can travel."""

from mpitrain.model.assemble import check_optimizer, flat_model, push_coder, remote_steps, shard_store
from mpitrain.model.elastic import ElasticStore
from mpitrain.model.flat import FlatModel, Layout
from mpitrain.model.frame import Frame, FramePool
from mpitrain.model.local import LocalSteps, local_steps
from mpitrain.model.optimizer import check_elementwise, rebuild
from mpitrain.model.pushing import PushCoder
from mpitrain.model.replica import Gradient, Replica
from mpitrain.model.reshard import reshard
from mpitrain.model.shard import ShardStore

__all__ = [
    "ElasticStore", "FlatModel", "Frame", "FramePool", "Gradient", "Layout", "LocalSteps", "PushCoder", "Replica",
    "ShardStore", "check_elementwise", "check_optimizer", "flat_model", "local_steps", "push_coder",
    "rebuild", "remote_steps", "reshard", "shard_store",
]  # fmt: skip
