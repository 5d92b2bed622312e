"""The model as one flat vector: shards for servers, a replica for workers, and buffers that can travel."""

from mpitrain.model.buffers import BufferPool, FixedBuffer
from mpitrain.model.elastic_shard import ElasticStore
from mpitrain.model.factory import check_optimizer, flat_model, push_coder, server_steps, shard_store
from mpitrain.model.flat import FlatModel, Layout
from mpitrain.model.local_steps import LocalSteps, local_steps
from mpitrain.model.optimizer import check_elementwise, rebuild
from mpitrain.model.push_codec import PushCoder
from mpitrain.model.reshard import reshard
from mpitrain.model.server_shard import ShardStore
from mpitrain.model.worker_replica import Gradient, Replica

__all__ = [
    "ElasticStore", "FlatModel", "FixedBuffer", "BufferPool", "Gradient", "Layout", "LocalSteps", "PushCoder",
    "Replica", "ShardStore", "check_elementwise", "check_optimizer", "flat_model", "local_steps", "push_coder",
    "rebuild", "reshard", "server_steps", "shard_store",
]  # fmt: skip
