"""The model as one flat vector: shards for servers, a replica for workers, and buffers that can travel."""

from mpitrain.model.factory import (
    check_optimizer,
    flat_model,
    peer_model,
    push_coder,
    server_steps,
    shard_store,
)
from mpitrain.model.optimizers.optimizer import check_elementwise, rebuild
from mpitrain.model.replicas.local_steps import LocalSteps, local_steps
from mpitrain.model.replicas.worker_replica import Gradient, Replica
from mpitrain.model.shards.elastic_shard import ElasticStore
from mpitrain.model.shards.reshard import reshard
from mpitrain.model.shards.server_shard import ShardStore
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer
from mpitrain.model.wire.flat import FlatModel, Layout
from mpitrain.model.wire.push_codec import PushCoder

__all__ = [
    "ElasticStore", "FlatModel", "FixedBuffer", "BufferPool", "Gradient", "Layout", "LocalSteps", "PushCoder",
    "Replica", "ShardStore", "check_elementwise", "check_optimizer", "flat_model", "local_steps", "peer_model",
    "push_coder", "rebuild", "reshard", "server_steps", "shard_store",
]  # fmt: skip
