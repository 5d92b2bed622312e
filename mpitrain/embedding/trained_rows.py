"""A table that has been trained, to look up only.

Invariants: a row that training never asked for is what it would have begun with, so every id has one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mpitrain.embedding.initial import initial_rows, key_of
from mpitrain.embedding.served import Found, ServedEmbedding
from mpitrain.embedding.tables import check_ids, served_layers


def look_up_here(module: nn.Module, seed: int) -> None:
    """Let the `ServedEmbedding`s of a module find rows as they begin, in this process, to learn what a step takes.
    Their gradients are computed, and train nothing."""
    for name, layer in served_layers(module).items():
        none = torch.zeros(0, dtype=torch.int64), layer.weight.detach()
        layer.find = TrainedRows(layer, name, seed, *none, wants_gradient=True)


class TrainedRows:
    """What a `ServedEmbedding` finds its rows with after training.

    Args:
        layer, name: of the table; seed: of the job that trained it.
        ids, rows: that training has asked for, in any order; wants_gradient: of what is found.
    """

    def __init__(
        self, layer: ServedEmbedding, name: str, seed: int, ids: torch.Tensor, rows: torch.Tensor,
        wants_gradient: bool = False,
    ):  # fmt: skip
        self._wants_gradient = wants_gradient
        order = torch.argsort(ids)
        self._ids, self._rows = ids[order].numpy(), rows[order]
        self._layer, self._name, self._key = layer, name, key_of(seed, name)

    def __call__(self, ids: torch.Tensor) -> Found:
        flat = check_ids(self._name, self._layer.num_embeddings, ids)
        unique, places = np.unique(flat, return_inverse=True)
        layer = self._layer
        rows = torch.from_numpy(initial_rows(layer.init, layer.scale, self._key, unique, layer.embedding_dim))
        rows = rows.to(self._rows.dtype)
        at = np.searchsorted(self._ids, unique)
        at[at == len(self._ids)] = 0
        known = np.flatnonzero(self._ids[at] == unique) if len(self._ids) else np.zeros(0, np.int64)
        rows[torch.from_numpy(known)] = self._rows[torch.from_numpy(at[known])]
        padding = np.flatnonzero(unique == (-1 if layer.padding_idx is None else layer.padding_idx))
        return Found(
            torch.from_numpy(places.reshape(tuple(ids.shape))).to(ids.device),
            rows.to(ids.device).requires_grad_(self._wants_gradient),
            int(padding[0]) if len(padding) else None,
        )
