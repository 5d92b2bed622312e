"""What a dry run says of tables on servers.

Invariants: sizes are arithmetic; how many rows a batch touches is counted in the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.embedding.lookups import HeldRows, Lookups
from mpitrain.embedding.tables import Table, tables_of
from mpitrain.model.buffers import wire_dtype
from mpitrain.strategies.base import ServerStrategy
from mpitrain.system.sizes import size_text

if TYPE_CHECKING:
    from mpitrain.job import Job


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
        most = 2 * touched > table.num_rows and not table.is_served
        advice = ": with sparse_as_dense=True about as much would travel" if most else ""
        yield f"            the first batch touches {touched:,} rows{advice}"


def touched_rows(job: Job, module: nn.Module, tables: list[Table], catalogue: Catalogue) -> list[int]:
    """How many rows of each table the first batch looks up."""
    if not tables:
        return []
    dtype = tables[0].parameter.dtype
    lookups = Lookups(tables, 1, torch.device("cpu"), dtype)
    rows = lookups.present = HeldRows(lookups, dtype)
    with job.data.reader(catalogue, job.seed) as reader:
        batch = reader.batch(0, 0, min(job.batch_size, catalogue.num_samples))
    found = rows.name(lambda: job.loss(module, batch))
    lookups.remove()
    return [len(ids) for ids in found]
