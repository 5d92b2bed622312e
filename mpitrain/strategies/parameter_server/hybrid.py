"""Synchronous SGD over two routes: dense parameters by an all-reduce among the workers, rows of tables by servers.

    w <- w - eta * mean of the gradients of all workers            on every worker, for dense parameters
    w_r <- w_r - eta * mean of the gradients of all workers        on a server, for every touched row r

Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019. A worker sends and
receives 2 (N - 1) / N of the dense parameters a step, however many workers there are, and of the tables the rows that
its batch touches.
"""

from __future__ import annotations

from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.damping.keep import Keep
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.parameter_server.sync import Sync
from mpitrain.values import register

TABLES = ("auto", "servers")
# A smaller table is dense whatever a batch touches: rows cost a message more. Chosen, not measured.
SMALL_BYTES = 1 << 16
ID_BYTES = 4  # of a row's number in a message, at most


@register("strategy", "hybrid")
class Hybrid(Sync):
    """Dense parameters by an all-reduce among the workers, which step them; rows of tables by servers.

    All N workers take part in every update, so the death of one ends the run, which goes on from its newest checkpoint
    with as many workers and any number of servers.

    Args:
        tables: "auto": a layer with `sparse=True` is dense where that moves fewer bytes; what a batch touches is
            counted in the first one. "servers": none is. A `ServedEmbedding` is always on the servers.
    """

    tables: str = "auto"

    reduces: ClassVar[bool] = True
    aggregates_by: ClassVar[str] = ""

    def check(self) -> None:
        super().check()
        self.hold_known("tables", TABLES)
        is_usual: dict[str, bool] = {
            "damping": self.damping == Keep(),
            "warmup": not self.warmup.epochs,
            "push_wire": self.push_codec.is_none,
            "reply_wire": self.reply_codec.is_none,
            "optimizer": self.optimizer == "server",
            "push_every": self.push_every == 1,
            "pull_every": self.pulls == 1,
            "batching": self.batching == PerWorker(),
        }
        for name, usual in is_usual.items():
            if not usual:
                raise UsageError(
                    f"hybrid: {name}={getattr(self, name)} is for gradients that servers take one by one, and here all "
                    "workers step together: leave it out, or use sync()"
                )

    @property
    def family(self) -> str:
        return "an all-reduce beside servers of tables"

    def is_dense(self, num_rows: int, row_bytes: int, num_touched: int) -> bool:
        """Whether a table of which a batch touches so many rows moves fewer bytes as a dense parameter: all of it twice
        in an all-reduce, against its touched rows to the servers and back."""
        num_bytes = num_rows * row_bytes
        return num_bytes <= max(SMALL_BYTES, num_touched * (row_bytes + ID_BYTES))
