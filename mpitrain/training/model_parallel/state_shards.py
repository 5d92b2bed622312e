"""One rank's shards of a split model and of its optimizer, as plain tensors for a checkpoint, and back.

Invariants: no rank sees more than its own shards, and nothing is sent; a shard fits only where the model is split
into as many parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.torch_versions import pytree


def whole_tensor(tensor: Any) -> torch.Tensor:
    """All of a tensor, on every rank; collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: object) -> Any:
    """What this rank holds of a tensor; what is no DTensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(shard: Any, model: Any) -> Any:
    """`shard` as this rank's part of a tensor that is sharded as `model` is."""
    if not isinstance(model, DTensor):
        return shard
    return DTensor.from_local(
        shard.to(model.device), model.device_mesh, model.placements, shape=model.shape, stride=model.stride()
    )


def take_shards(module: nn.Module, rates: Rates) -> dict[str, Any]:
    """This rank's shards of the module's and the optimizer's state; `held`: which of the optimizer's are shards
    of something larger, as (number of the parameter, name)."""
    kept = rates.state()
    held = [
        [number, name]
        for number, entries in kept["state"].items()
        for name, value in entries.items()
        if isinstance(value, DTensor)
    ]
    return {
        "module": {name: local(tensor) for name, tensor in module.state_dict().items()},
        "optimizer": pytree.tree_map(local, kept),
        "held": held,
    }


def restore_shards(module: nn.Module, rates: Rates, saved: dict[str, Any]) -> None:
    """Continue from what `take_shards` returned on the rank that held this part."""
    shapes = module.state_dict()
    module.load_state_dict({name: _like(shard, shapes.get(name)) for name, shard in saved["module"].items()})
    parameters = [parameter for group in rates.optimizer.param_groups for parameter in group["params"]]
    for number, name in saved["held"]:
        entries = saved["optimizer"]["state"][number]
        entries[name] = _like(entries[name], parameters[number])
    rates.restore(saved["optimizer"])
