"""Which layers of a model are units of FSDP2, and which are sliced in tensor parallelism.

Invariants: nothing here knows of MPI, so that a plan and a simulation cut a model as a run does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from mpitrain.errors import UsageError
from mpitrain.model.building.activation_checkpointing import layers
from mpitrain.system.files.outside import choose_names


def units(module: nn.Module) -> list[nn.Module]:
    """Layers that have parameters of their own which no other layer uses."""
    found = layers(module)
    uses = Counter(id(parameter) for layer in found for parameter in set(layer.parameters()))
    return [layer for layer in found if all(uses[id(parameter)] == 1 for parameter in layer.parameters())]


def slices(module: nn.Module, plan: Mapping[str, str], count: int) -> dict[str, str]:
    """The layers that a job's `tensor_plan` slices into `count`, by their full names.

    Raises:
        UsageError: there is no plan, a pattern names no layer or a layer that cannot be sliced, or its width is no
            multiple of `count`.
    """
    if not plan:
        raise UsageError(
            'tensor() needs the job to say which layers are sliced: tensor_plan={"layers.*.up": "column", '
            '"layers.*.down": "row"}'
        )
    named = dict(module.named_modules())
    found: dict[str, str] = {}
    for pattern, way in plan.items():
        names = choose_names(pattern, named)
        if not names:
            raise UsageError(f"tensor_plan: {pattern!r} matches none of {', '.join(filter(None, named))}")
        for name in names:
            if name in found:
                raise UsageError(f"tensor_plan: {name} is matched twice, last by {pattern!r}")
            _check(name, named[name], way, count)
            found[name] = way
    return found


def _check(name: str, layer: nn.Module, way: str, count: int) -> None:
    if isinstance(layer, nn.Linear):
        width = layer.in_features if way == "row" else layer.out_features
    elif isinstance(layer, nn.Embedding):
        width = layer.num_embeddings if way == "row" else layer.embedding_dim
    else:
        raise UsageError(
            f"tensor_plan: {name} is {type(layer).__name__}; only Linear and Embedding can be sliced"
        )
    if width % count:
        raise UsageError(
            f"tensor_plan: {name} has {width} numbers to slice as {way!r}, no multiple of {count}"
        )
