"""`mt.ServedEmbedding`: a table of embeddings whose rows live on the parameter servers alone.

Invariants: the module holds no row. Under a strategy with servers a forward pass is handed the rows of its batch
(`lookups.py`); a trained table is read back from what the servers have written (`trained_rows.py`). Its one parameter
has no rows: it stands for the table in `module.parameters()`, so the options of the group it is in are the table's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.embedding.initial import LAWS
from mpitrain.embedding.partition import MAX_ROWS, WAYS
from mpitrain.errors import UsageError

MODES = ("sum", "mean")


class Found(NamedTuple):
    """Where the rows of some ids lie: `rows[places]`, with `places` of the ids' shape, are theirs. `padding`: the place
    of the id whose row gets no gradient; None where it is not among the rows."""

    places: torch.Tensor
    rows: torch.Tensor
    padding: int | None = None


Find = Callable[[torch.Tensor], Found]


class ServedEmbedding(nn.Module):
    """As `torch.nn.Embedding`, or with a `mode` as `torch.nn.EmbeddingBag`, for tables larger than any worker's memory.

    Args:
        num_embeddings: rows, at most 2^32; embedding_dim: numbers a row.
        mode: None returns a row for every id, shape (*ids.shape, embedding_dim). "sum" and "mean" return one row for
            every row of ids of shape (bags, ids), or for every offset.
        init, scale: how a row begins: "normal" of this standard deviation, "uniform" between -scale and scale, or
            "zeros"; a function of the job's seed, the table's name and the id, whatever the number of servers.
        partition: which server holds a row: "hash" spreads frequent ids evenly; "range" keeps neighbours together.
        padding_idx: an id whose row gets no gradient; a bag leaves it out.

    Raises:
        UsageError: one of these has a value that there is not.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, mode: str | None = None, init: str = "normal",
        scale: float = 0.01, partition: str = "hash", padding_idx: int | None = None,
    ):  # fmt: skip
        super().__init__()
        if not 1 <= num_embeddings <= MAX_ROWS or embedding_dim < 1:
            raise UsageError(
                f"ServedEmbedding: a table has from 1 to {MAX_ROWS:,} rows of at least one number, got "
                f"{num_embeddings:,} of {embedding_dim}"
            )
        for name, value, known in (("init", init, LAWS), ("partition", partition, WAYS)):
            if value not in known:
                raise UsageError(f"ServedEmbedding: {name} is one of {', '.join(known)}, got {value!r}")
        if mode not in (None, *MODES):
            raise UsageError(f"ServedEmbedding: mode is None, {' or '.join(MODES)}, got {mode!r}")
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise UsageError(f"ServedEmbedding: padding_idx={padding_idx} is no id below {num_embeddings:,}")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.init, self.scale, self.partition, self.padding_idx = init, scale, partition, padding_idx
        self.weight = nn.Parameter(torch.empty(0, embedding_dim))
        self.find: Find | None = None  # where rows come from

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of `ids`, or of its bags.

        Raises:
            UsageError: nobody serves rows here, or an id is none of the table's.
        """
        if self.find is None:
            raise UsageError(
                "this ServedEmbedding has no rows: they live on parameter servers while a job trains under async(), "
                "sync(), softsync() or ssp(), and mpitrain.load(run_dir) reads them back after it; "
                "a model that trains elsewhere takes nn.Embedding(sparse=True)"
            )
        return look_up(self.find(ids), self, offsets)

    def extra_repr(self) -> str:
        """What torch prints of it."""
        mode = "" if self.mode is None else f", mode={self.mode!r}"
        return f"{self.num_embeddings}, {self.embedding_dim}{mode}, init={self.init!r}, scale={self.scale:g}"


def look_up(
    found: Found, layer: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """What a layer (an `nn.Embedding`, an `nn.EmbeddingBag` or a `ServedEmbedding`) returns for ids of which these rows
    were found."""
    mode = getattr(layer, "mode", None)
    if mode is None:
        return nn.functional.embedding(found.places, found.rows, found.padding)
    return nn.functional.embedding_bag(
        found.places, found.rows, offsets, mode=mode, per_sample_weights=per_sample_weights,
        include_last_offset=getattr(layer, "include_last_offset", False), padding_idx=found.padding,
    )  # fmt: skip
