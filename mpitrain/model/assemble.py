"""The model wing's pieces as a strategy asks for them: one place that knows which setting goes where."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from mpitrain.model.flat import FlatModel
from mpitrain.model.shard import ShardStore
from mpitrain.rules import ServerStrategy


def flat_model(module: nn.Module, optimizer: Optimizer, strategy: ServerStrategy) -> FlatModel:
    """The module as one flat vector, with frames as wide as the strategy's wire."""
    return FlatModel(module, optimizer, strategy.servers, strategy.push_wire, strategy.reply_wire)


def shard_store(model: FlatModel, shard: int, optimizer: Optimizer, strategy: ServerStrategy) -> ShardStore:
    """One server's shard of `model`, starting from the parameters it holds."""
    initial, wires = model.frames[shard].body, (strategy.push_wire, strategy.reply_wire)
    return ShardStore(model.layout, shard, initial, optimizer, strategy.damping, *wires)
