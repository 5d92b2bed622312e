"""Which route each table of a model takes under `hybrid`: rows by servers, or all of it with the dense parameters.

Invariants: one rank decides for all, by sizes and by how many rows the first batch of the job looks up.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.batch import to_device
from mpitrain.embedding.lookups import HeldRows, Lookups
from mpitrain.embedding.tables import Table, tables_of
from mpitrain.job import Job
from mpitrain.model.gradient.sparse_gradients import row_bytes
from mpitrain.model.wire.flat import trainable
from mpitrain.strategies.parameter_server.hybrid import Hybrid


class Route(NamedTuple):
    """Of one table: whether it is dense from here on, and how many of its rows the first batch looks up."""

    table: Table
    is_dense: bool
    num_touched: int


def choose_routes(job: Job, module: nn.Module, catalogue: Catalogue) -> list[Route]:
    """The route of each table; layers whose tables are to be dense have no `sparse=True` any more."""
    routes = _routes(job, module, catalogue)
    make_dense(module, [route.table.name for route in routes if route.is_dense])
    return routes


def dense_tables(job: Job, module: nn.Module, catalogue: Catalogue) -> list[str]:
    """Names of the tables that are to be dense."""
    return [route.table.name for route in _routes(job, module, catalogue) if route.is_dense]


def make_dense(module: nn.Module, names: Collection[str]) -> None:
    """The layers of these tables have no `sparse=True` any more."""
    for table in tables_of(module) if names else ():
        if table.name in names:
            table.layer.sparse = False


def _routes(job: Job, module: nn.Module, catalogue: Catalogue) -> list[Route]:
    strategy = job.strategy
    if not isinstance(strategy, Hybrid) or strategy.tables == "servers":
        return []
    tables = tables_of(module)
    return [
        Route(
            table,
            not table.is_served
            and strategy.is_dense(table.num_rows, row_bytes(table.parameter), num_touched),
            num_touched,
        )
        for table, num_touched in zip(tables, touched_rows(job, module, tables, catalogue), strict=True)
    ]


def reduced_bytes(job: Job, module: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that workers over servers all-reduce among themselves once routes are chosen: gradients and their share."""
    if job.strategy is None or not job.strategy.reduces:
        return 0
    apart = {id(table.parameter) for table in tables_of(module)}
    every = [parameter for _, parameter, _ in trainable(module, optimizer)]
    return sum(one.nbytes for one in every if id(one) not in apart) + every[0].element_size()


def touched_rows(job: Job, module: nn.Module, tables: list[Table], catalogue: Catalogue) -> list[int]:
    """How many rows of each table the first batch looks up."""
    if not tables:
        return []
    dtype, device = tables[0].parameter.dtype, next(module.parameters()).device
    lookups = Lookups(tables, 1, device, dtype)
    rows = lookups.present = HeldRows(lookups, dtype)
    with job.data.reader(catalogue, job.seed) as reader:
        batch = reader.batch(0, 0, min(job.batch_size, catalogue.num_samples))
    on_device = to_device(batch, device)
    kept = [buffer.clone() for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[]):
        found = rows.name(lambda: job.loss(module, on_device))
    for buffer, value in zip(module.buffers(), kept, strict=True):
        buffer.copy_(value)
    lookups.remove()
    return [len(ids) for ids in found]
