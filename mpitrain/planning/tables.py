"""What a dry run says of tables on servers.

Invariants: sizes are arithmetic; how many rows a batch touches is counted in the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.embedding.tables import tables_of
from mpitrain.job import Job
from mpitrain.model.wire.buffers import wire_dtype
from mpitrain.strategies.base import ServerStrategy
from mpitrain.system.sizes import size_text
from mpitrain.training.routes import Route, reduced_bytes, touched_rows


def describe_reduced(
    job: Job, module: nn.Module, optimizer: Optimizer, routes: list[Route], num_workers: int
) -> Iterator[str]:
    """Lines of what workers all-reduce: the dense parameters, and the tables that are among them."""
    num_bytes = reduced_bytes(job, module, optimizer)
    least = size_text(2 * (num_workers - 1) / num_workers * num_bytes)
    yield f"messages    allreduce of {size_text(num_bytes)} a step among the workers; at least {least} sent by each"
    for route in routes:
        if route.is_dense:
            table = route.table
            yield (
                f"            {table.name} is part of it: {table.num_rows:,} rows of {table.width}, and the first "
                f"batch touches {route.num_touched:,}"
            )


def describe_tables(
    job: Job, strategy: ServerStrategy, module: nn.Module, catalogue: Catalogue
) -> Iterator[str]:
    """Lines of each table: where its rows are, what one of them takes on the wire, and how many of them the first batch
    touches."""
    tables = tables_of(module)
    for table, touched in zip(tables, touched_rows(job, module, tables, catalogue), strict=True):
        way = table.partition(strategy.servers).way
        where = "on the servers alone" if table.is_served else "begun with the layer's own"
        yield (
            f"tables      {table.name}: {table.num_rows:,} rows of {table.width}, {size_text(table.num_bytes)}, by "
            f"{way} over {strategy.servers} server{'s' * (strategy.servers > 1)}, {where}"
        )
        sizes = [
            table.width * wire_dtype(wire, table.parameter.dtype).itemsize
            for wire in (strategy.push_numbers, strategy.reply_numbers)
        ]
        yield (
            f"            a push carries {sizes[0]} bytes of each row that a batch touches and its answer {sizes[1]}, "
            "with their ids"
        )
        most = 2 * touched > table.num_rows and not table.is_served and not strategy.reduces
        advice = ": with sparse_as_dense=True about as much would travel" if most else ""
        yield f"            the first batch touches {touched:,} rows{advice}"
