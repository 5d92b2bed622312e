"""A module split by layers into the stages of a pipeline, and what every stage's tensors are called in the whole.

Invariants: a stage is made of the model's own layers, so all of its parameters are the model's, under the
names that the model gave them; every parameter belongs to exactly one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import UsageError


@dataclass(frozen=True)
class Stage:
    """One stage: its module, and `names[name in the whole model] = name in the stage` of its saved tensors."""

    module: nn.Module
    names: dict[str, str]

    @property
    def num_parameters(self) -> int:
        """Numbers in its parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def split_stages(module: nn.Module, count: int, how: object = None) -> list[Stage]:
    """The `count` stages of a module.

    Args:
        how: as `Job.stages`: names of submodules that make the model when called in turn, a function
            `(module, count) -> modules`, or None for the layers of an `nn.Sequential`.

    Raises:
        UsageError: the layers are not named, are too few, or a parameter is in no stage or in two.
    """
    modules = _modules(module, count, how)
    saved = module.state_dict(keep_vars=True)
    home: dict[int, int] = {}
    for index, stage in enumerate(modules):
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if home.setdefault(id(tensor), index) != index:
                raise UsageError(
                    f"{_whole_name(saved, tensor, name)} is in stage {home[id(tensor)]} and in stage {index}: tied "
                    "weights cannot be split, keep the layers that share them in one stage"
                )
    for name, tensor in saved.items():
        if isinstance(tensor, nn.Parameter) and id(tensor) not in home:
            raise UsageError(
                f"parameter {name} is in no stage and would not be trained; name its layer in stages="
            )
    return [Stage(stage, _names(saved, stage)) for stage in modules]


def _modules(module: nn.Module, count: int, how: Any) -> list[nn.Module]:
    if callable(how):
        modules = list(how(module, count))
        if len(modules) != count or not all(isinstance(stage, nn.Module) for stage in modules):
            raise UsageError(
                f"stages(model, {count}) must return {count} modules, got {len(modules)}: {modules!r}"
            )
        return modules
    if how is None and not isinstance(module, nn.Sequential):
        raise UsageError(
            f"cannot name the layers of {type(module).__name__}: only nn.Sequential is split by itself; give the job "
            'stages=("embed", "layers.0", ...), or a function stages(model, count) that returns the modules'
        )
    layers = (
        [layer for _, layer in module.named_children()] if how is None else [_layer(module, n) for n in how]
    )
    if len(layers) < count:
        raise UsageError(f"{len(layers)} layer(s) cannot make {count} stages")
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return [nn.Sequential(*layers[start:stop]) for start, stop in cut(sizes, count)]


def _layer(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(name for name, _ in module.named_children())
        raise UsageError(f"stages: the model has no submodule {name!r}; its children are {known}") from error


def _names(saved: dict[str, Any], stage: nn.Module) -> dict[str, str]:
    local = {id(tensor): name for name, tensor in stage.state_dict(keep_vars=True).items()}
    return {name: local[id(tensor)] for name, tensor in saved.items() if id(tensor) in local}


def _whole_name(saved: dict[str, Any], wanted: object, otherwise: str) -> str:
    return next((name for name, tensor in saved.items() if tensor is wanted), otherwise)


def cut(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """`sizes` cut into `count` runs [start, stop), none empty, so that the largest sum is as small as it can be."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # best[stop] = (largest sum, where the runs end) for the first `stop` sizes in as many runs as rounds have passed
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(count):
        following: dict[int, tuple[int, list[int]]] = {}
        for stop in range(1, len(sizes) + 1):
            options = [
                (max(largest, ends[stop] - ends[start]), [*stops, stop])
                for start, (largest, stops) in best.items()
                if start < stop
            ]
            if options:
                following[stop] = min(options)
        best = following
    stops = best[len(sizes)][1]
    return list(zip([0, *stops[:-1]], stops))


def keep_only(optimizer: Optimizer, module: nn.Module) -> None:
    """Make an optimizer of the whole model that of one stage: groups and their options stay, other parameters go."""
    mine = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if id(parameter) in mine]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in mine]:
        del optimizer.state[parameter]
