"""The tables that servers leave in the run directory, and reading them back.

Invariants: every server writes what it holds of all its `ServedEmbedding`s, as `tables-0.safetensors` and so on, each
table as "NAME/ids" and "NAME/rows"; so a table is never in one place as a whole. A layer of torch's own is in the
model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from mpitrain.embedding.shard import TableShard
from mpitrain.embedding.tables import served_layers
from mpitrain.embedding.trained_rows import TrainedRows
from mpitrain.errors import UsageError
from mpitrain.training.measure import save_tensors


def tables_file(run_dir: Path, shard: int) -> Path:
    """Where a server leaves its part."""
    return run_dir / f"tables-{shard}.safetensors"


def save_tables(
    run_dir: Path, shard: int, num_shards: int, seed: int, module: nn.Module, tables: Iterable[TableShard]
) -> None:
    """Leave one server's part of the tables that no worker holds, where there are any; `seed`: of the job."""
    served = served_layers(module)
    states = {table.name: table.begun() for table in tables if table.name in served}
    if states:
        tensors = {f"{name}/{key}": state[key] for name, state in states.items() for key in ("ids", "rows")}
        save_tensors(tensors, tables_file(run_dir, shard), {"shards": str(num_shards), "seed": str(seed)})


def load_tables(run_dir: Path, module: nn.Module) -> None:
    """Let the `ServedEmbedding`s of a trained module find their rows in what servers have left.

    Raises:
        UsageError: a server's part is missing or damaged, or of other tables.
    """
    from safetensors import SafetensorError, safe_open

    layers = served_layers(module)
    if not layers:
        return
    found: dict[str, list[torch.Tensor]] = {}
    number, num_shards, seed = 0, 1, 0
    while number < num_shards:
        path = tables_file(run_dir, number)
        try:
            with safe_open(path, "pt") as file:
                num_shards, seed = int(file.metadata()["shards"]), int(file.metadata()["seed"])
                for name in file.keys():  # noqa: SIM118 - no mapping
                    found.setdefault(name, []).append(file.get_tensor(name))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: no server's part of the tables {', '.join(layers)}: {error}"
            ) from error
        number += 1
    for name, layer in layers.items():
        if f"{name}/ids" not in found or found[f"{name}/rows"][0].shape[1] != layer.embedding_dim:
            raise UsageError(
                f"{tables_file(run_dir, 0)} holds no table {name!r} with rows of {layer.embedding_dim} numbers; pass "
                "the job that the run has trained"
            )
        ids, rows = torch.cat(found[f"{name}/ids"]), torch.cat(found[f"{name}/rows"])
        layer.find = TrainedRows(layer, name, seed, ids, rows)
