"""The tables of a model that servers hold: its `ServedEmbedding`s, and its layers with `sparse=True`.

Invariants: the order is that of the model's modules, so all ranks number the tables alike. A layer of torch's own keeps
its weight, with which the servers begin; from then on the rows of a batch come from them, and the weight itself is
brought up to date when the final model is delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.embedding.partition import Partition
from mpitrain.embedding.served import ServedEmbedding
from mpitrain.errors import UsageError


@dataclass(frozen=True, eq=False)
class Table:
    """One table: its name in the model, the layer, and the layer's parameter, whose options it has."""

    name: str
    layer: Any

    @property
    def parameter(self) -> nn.Parameter:
        """That stands for it in the optimizer."""
        weight: nn.Parameter = self.layer.weight
        return weight

    @property
    def is_served(self) -> bool:
        """Whether no rank but the servers ever holds its rows."""
        return isinstance(self.layer, ServedEmbedding)

    @property
    def num_rows(self) -> int:
        return int(self.layer.num_embeddings)

    @property
    def width(self) -> int:
        """Numbers a row."""
        return int(self.layer.embedding_dim)

    @property
    def num_bytes(self) -> int:
        """Of all its rows."""
        return self.num_rows * self.width * self.parameter.itemsize

    def partition(self, num_servers: int) -> Partition:
        """Over so many servers."""
        way = self.layer.partition if self.is_served else "hash"
        return Partition(self.num_rows, num_servers, way)


def served_layers(module: nn.Module) -> dict[str, ServedEmbedding]:
    """The layers, by name, whose rows live on servers alone."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, ServedEmbedding)}


def tables_of(module: nn.Module) -> list[Table]:
    """The tables of a model; one that two modules share is one.

    Raises:
        UsageError: a layer of torch's own has a setting that rows which come one batch at a time cannot have.
    """
    found: list[Table] = []
    for name, layer in module.named_modules():
        sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        if not (sparse or isinstance(layer, ServedEmbedding)) or not layer.weight.requires_grad:
            continue
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(layer, option, None):
                raise UsageError(
                    f"layer {name!r}: {option} changes rows as they are looked up, and here they live on servers; "
                    "leave it out, or sparse=True"
                )
        if id(layer.weight) in {id(one.parameter) for one in found}:
            raise UsageError(
                f"layer {name!r} shares its weight with another one of sparse gradients: look both up in one layer"
            )
        found.append(Table(name or type(layer).__name__, layer))
    return found


def check_tables(
    module: nn.Module, tables: list[Table], trained: list[nn.Parameter], dtype: torch.dtype
) -> None:
    """Refuse tables that are not among what is trained, that a dense part of the model shares, or whose numbers are
    others than the dense ones'.

    Raises:
        UsageError: names the table.
    """
    trained_ids = {id(parameter) for parameter in trained}
    for table in tables:
        if id(table.parameter) not in trained_ids:
            raise UsageError(
                f"table {table.name!r} is in no group of the optimizer: hand it model.parameters(), or freeze it with "
                "requires_grad_(False)"
            )
        others = [
            name
            for name, layer in module.named_modules()
            if layer is not table.layer
            and any(one is table.parameter for one in layer.parameters(recurse=False))
        ]
        if others:
            raise UsageError(
                f"the weight of table {table.name!r} is also that of {others[0]!r}, which needs all of its rows; leave "
                "sparse=True out"
            )
        if table.parameter.dtype != dtype:
            raise UsageError(
                f"table {table.name!r} is {table.parameter.dtype} and the rest of the model {dtype}: servers want one"
            )


def check_ids(table: str, num_rows: int, ids: torch.Tensor) -> np.ndarray:
    """Ids of a look-up as int64 on the host, in one dimension.

    Raises:
        UsageError: one is no row of the table; names its sample and field.
    """
    flat = np.asarray(ids.detach().reshape(-1).cpu().numpy())
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(
            f"table {table!r} is looked up by whole numbers, and the batch has ids of {ids.dtype}"
        )
    wrong = (flat < 0) | (flat >= num_rows)
    if wrong.any():
        first = int(wrong.argmax())
        place = np.unravel_index(first, tuple(ids.shape)) if ids.dim() else ()
        where = "".join(
            f", {name} {at}" for name, at in zip(("sample", "field", "place"), place, strict=False)
        )
        raise UsageError(
            f"table {table!r} has rows 0 to {num_rows - 1:,}, and the batch asks for id {int(flat[first])}{where}: "
            "take ids modulo the number of rows, or correct the data"
        )
    return flat.astype(np.int64, copy=False)
