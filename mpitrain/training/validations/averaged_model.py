"""The moving average of the weights that a job with `ema` leaves beside its model.

Invariants: what is not trained (buffers, frozen parameters) is that of the last model. Servers leave their parts in the
run directory, and the first rank puts them together when all have.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from mpitrain.model.wire.flat import Layout
from mpitrain.training.measure import MODEL_FILE, save_tensors

EMA_MODEL_FILE = "model-ema.safetensors"


def part_file(run_dir: Path, shard: int) -> Path:
    """Where a server leaves its part."""
    return run_dir / f".ema-{shard}.safetensors"


def save_part(run_dir: Path, shard: int, values: list[torch.Tensor]) -> None:
    """Leave one server's part."""
    save_tensors({"average": values[0]}, part_file(run_dir, shard), {})


def join_parts(run_dir: Path, module: nn.Module, layout: Layout) -> None:
    """Put the parts of all servers together, where all are there, as is the model."""
    from safetensors.torch import load_file

    files = [part_file(run_dir, shard) for shard in range(layout.num_shards)]
    if (run_dir / MODEL_FILE).is_file() and all(file.is_file() for file in files):
        join(run_dir, module, layout, [load_file(file)["average"] for file in files])
    for file in files:
        file.unlink(missing_ok=True)


def join(run_dir: Path, module: nn.Module, layout: Layout, parts: Iterable[torch.Tensor]) -> None:
    """Write the model with the averages of all shards in place of what was trained."""
    from safetensors.torch import load_file

    whole = load_file(run_dir / MODEL_FILE)
    named = dict(module.named_parameters())
    state = module.state_dict(keep_vars=True)
    for shard, part in enumerate(parts):
        for index, start, stop, at in layout.pieces(shard):
            parameter = named[layout.names[index]]
            for name in (
                one for one, tensor in state.items() if tensor is parameter
            ):  # tied ones have several
                whole[name].view(-1)[start:stop] = part[at : at + stop - start]
    save_tensors(whole, run_dir / EMA_MODEL_FILE, {})
