"""The model wing's pieces as a strategy asks for them: one place that knows which setting goes where."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.optim import SGD, Optimizer

from mpitrain.model.elastic import ElasticStore
from mpitrain.model.flat import FlatModel
from mpitrain.model.optimizer import check_elementwise
from mpitrain.model.shard import ShardStore
from mpitrain.rules import Elastic, ServerStrategy


def flat_model(module: nn.Module, optimizer: Optimizer, strategy: ServerStrategy) -> FlatModel:
    """The module as one flat vector, with frames as wide as the strategy's wire. What arrives while the model is
    in use, or is not its parameters, gets frames of its own."""
    apart = strategy.inflight > 1 or strategy.elastic
    return FlatModel(
        module, optimizer, strategy.servers, strategy.push_wire, strategy.reply_wire, replies_apart=apart
    )


def check_optimizer(optimizer: Optimizer, strategy: ServerStrategy) -> None:
    """Refuse an optimizer that this strategy's servers would have to run and cannot.

    Raises:
        UsageError: it is not elementwise.
    """
    if strategy.optimizer == "server":
        check_elementwise(optimizer)


def shard_store(
    model: FlatModel, shard: int, optimizer: Optimizer, strategy: ServerStrategy, num_workers: int
) -> ShardStore | ElasticStore:
    """One server's shard of `model`, starting from the parameters it holds. Where workers keep their own
    optimizer the server adds what they push: w <- w - mean of it."""
    initial, wires = model.frames[shard].body, (strategy.push_wire, strategy.reply_wire)
    if strategy.elastic:
        return ElasticStore(model.layout, shard, initial, cast(Elastic, strategy).share(num_workers), *wires)
    if strategy.optimizer == "worker":
        optimizer = SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=1.0)
    return ShardStore(model.layout, shard, initial, optimizer, strategy.damping, *wires)
