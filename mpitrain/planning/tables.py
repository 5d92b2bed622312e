"""What a dry run says of tables on servers.

Invariants: sizes only; which rows a batch touches is known when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mpitrain.embedding.tables import Table
from mpitrain.model.buffers import wire_dtype
from mpitrain.strategies.base import ServerStrategy
from mpitrain.system.sizes import size_text


def describe_tables(tables: Iterable[Table], strategy: ServerStrategy) -> Iterator[str]:
    """Lines of each table: where its rows are, and what one of them takes on the wire."""
    for table in tables:
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
            f"            of rows that a batch touches a push carries {sizes[0]} bytes each and the answer {sizes[1]}, "
            "with their ids"
        )
