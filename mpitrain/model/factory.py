"""The model wing's pieces as a strategy asks for them: one place that knows which setting goes where."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from mpitrain.embedding.initial import initial_rows, key_of
from mpitrain.embedding.lookups import Lookups
from mpitrain.embedding.shard import Begin, TableShard
from mpitrain.embedding.tables import Table
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates, check_closure, check_elementwise, check_weighable
from mpitrain.model.optimizers.optimizer_state import state_slices
from mpitrain.model.optimizers.server_steps import ServerSteps
from mpitrain.model.optimizers.step_hooks import check_step
from mpitrain.model.recipe import Recipe
from mpitrain.model.shards.elastic_shard import ElasticStore
from mpitrain.model.shards.server_shard import ShardStore
from mpitrain.model.shards.tabled_shard import TabledStore
from mpitrain.model.wire.codec_registry import check_optimizer as check_momentum
from mpitrain.model.wire.flat import FlatModel, Wires
from mpitrain.model.wire.masters import SIXTEEN
from mpitrain.model.wire.push_codec import PushCoder
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.features import MPI, why_not
from mpitrain.strategies.parameter_server.elastic import Elastic


def flat_model(module: nn.Module, optimizer: Optimizer, strategy: ServerStrategy) -> FlatModel:
    """The module as one flat vector, with wire buffers as wide as the strategy's wire. What arrives while the model is
    in use, or is not its parameters, gets wire buffers of its own."""
    apart = strategy.inflight > 1 or strategy.elastic
    coded = not strategy.push_codec.is_none, not strategy.reply_codec.is_none
    wires = Wires(strategy.push_numbers, strategy.reply_numbers, apart, *coded)
    return FlatModel(
        module,
        optimizer,
        strategy.servers,
        wires,
        strategy.reduces,
        why_not("changes in place", strategy, MPI),
        strategy.moves,
        str(strategy),
    )


def peer_model(module: nn.Module, optimizer: Optimizer, strategy: Decentralized, world: str) -> FlatModel:
    """The module of a peer, which steps it."""
    lost = why_not("changes in place", strategy, world)
    return FlatModel(module, optimizer, 1, in_place_lost=lost, steps=True, strategy=str(strategy))


def check_optimizer(optimizer: Optimizer, strategy: ServerStrategy) -> None:
    """Refuse an optimizer that this strategy's servers would have to run and cannot, or that its codecs cannot serve.

    Raises:
        UsageError: it is not elementwise, needs a closure, its step was replaced, or its steps cannot be weighed;
            codecs for parameters in float64, or sums on nodes of gradients in 16 bits; momentum twice.
    """
    check_closure(optimizer, str(strategy))
    if strategy.optimizer == "server":
        check_elementwise(optimizer)
        check_weighable(optimizer, strategy)
        check_step(optimizer)
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    for codec in (strategy.push_codec, strategy.reply_codec):
        if not codec.is_none and torch.float64 in dtypes:
            raise UsageError(
                f"{codec}: a codec takes parameters of float32 or 16 bits, these are torch.float64"
            )
    if strategy.sums_on_nodes and dtypes & set(SIXTEEN) and len(dtypes) == 1:
        raise UsageError(
            f"{strategy}: a node's sums would be rounded to {dtypes.pop()}, in which this model travels: leave "
            "aggregate out"
        )
    check_momentum(strategy.push_codec, optimizer)


def server_steps(model: FlatModel, optimizer: Optimizer, strategy: ServerStrategy) -> ServerSteps | None:
    """What stays on a worker of an optimizer that servers run; None where workers run it."""
    return ServerSteps(optimizer, model.parameters) if strategy.optimizer == "server" else None


def push_coder(
    model: FlatModel, strategy: ServerStrategy, num_workers: int, worker: int, seed: int
) -> PushCoder | None:
    """What codes the pushes of one of `num_workers` workers; None where numbers travel as they are."""
    if strategy.push_codec.is_none:
        return None
    count = strategy.num_contributors(num_workers)
    return PushCoder(model.layout, strategy.push_codec, count, worker, seed)


def shard_store(
    model: FlatModel,
    shard: int,
    optimizer: Optimizer,
    strategy: ServerStrategy,
    recipe: Recipe = Recipe(),  # noqa: B008 - frozen
) -> ShardStore | ElasticStore:
    """One server's shard of `model`, starting from the parameters it holds and the state of `optimizer`, where it has
    any. Where workers keep their own optimizer the server adds what they push: w <- w - mean of it."""
    initial, rule, pace = model.wire_buffers[shard].body, recipe.update, recipe.update.pace(Rates(optimizer))
    if strategy.elastic:
        centred = cast(Elastic, strategy)
        share = centred.share(rule.law.num_workers)
        return ElasticStore(model.layout, shard, initial, share, centred, rule, pace)
    if strategy.optimizer == "worker":
        optimizer = SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=1.0)
    arguments = (model.layout, shard, initial, optimizer, strategy, rule, pace)
    store = (
        ShardStore(*arguments)
        if model.lookups is None
        else TabledStore(
            table_shards(model, model.lookups, shard, optimizer, recipe.gradient.seed), *arguments
        )
    )
    store.begin_with(
        state_slices(
            optimizer, model.parameters, model.layout.pieces(shard), model.layout.group_slices(shard)
        )
    )
    return store


def table_shards(
    model: FlatModel, lookups: Lookups, shard: int, optimizer: Optimizer, seed: int
) -> list[TableShard]:
    """One server's part of every table of `model`. The rows of a layer that holds its own weight begin with that."""
    groups = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    made = []
    for table, partition in zip(lookups.tables, lookups.partitions, strict=True):
        begin = _served_rows(table, seed) if table.is_served else _own_rows(table)
        dtype, group = model.layout.dtype, groups[id(table.parameter)]
        one = TableShard(table.name, partition, shard, table.width, dtype, begin, group)
        if not table.is_served:
            one.see_all()
        made.append(one)
    return made


def _served_rows(table: Table, seed: int) -> Begin:
    layer, key = table.layer, key_of(seed, table.name)
    return lambda ids: torch.from_numpy(initial_rows(layer.init, layer.scale, key, ids, table.width))


def _own_rows(table: Table) -> Begin:
    return lambda ids: table.parameter.detach()[torch.from_numpy(ids)]
