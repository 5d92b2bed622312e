"""Rebuilding a torch optimizer over slices of a flat vector.

Law of this file: a server may only run an optimizer whose update of one element looks at no other element,
for then any slicing gives the same bits. What needs a whole layer (norms, matrices, line searches) is refused
with the reason, never approximated.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.rules import ServerStrategy

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ASGD",
    "Rprop",
)

UNWEIGHABLE = (torch.optim.ASGD, torch.optim.Rprop)


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot run on slices.

    Raises:
        UsageError: its class is not one of torch's elementwise optimizers and does not declare itself
            `elementwise = True`.
    """
    cls = type(optimizer)
    if not _is_known(cls) and not getattr(cls, "elementwise", False):
        raise UsageError(
            f"optimizer {cls.__name__} cannot run on a parameter server: a server owns slices that "
            "cut through layers, so only "
            f"elementwise optimizers keep their meaning there ({', '.join(ELEMENTWISE)}). Use "
            "strategy allreduce, or set "
            f"`{cls.__name__}.elementwise = True` if each element's update depends on that element alone"
        )


def check_weighable(optimizer: Optimizer, strategy: ServerStrategy) -> None:
    """Refuse weights for an optimizer whose steps no rate of the moment scales.

    Raises:
        UsageError: Rprop or ASGD, and a strategy that weighs gradients.
    """
    by = strategy.damping if strategy.damping.scales else strategy.batching
    if isinstance(optimizer, UNWEIGHABLE) and (strategy.damping.scales or strategy.batching.measures):
        raise UsageError(
            f"{strategy}: {by} weighs a gradient by scaling the learning rate of its update, and "
            f"{type(optimizer).__name__} keeps lengths of steps of its own, which no rate scales: use another "
            "optimizer, or leave that setting out"
        )


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim") and cls.__name__ in ELEMENTWISE


def rebuild(prototype: Optimizer, slices: list[tuple[int, nn.Parameter]]) -> Optimizer:
    """A new optimizer of the prototype's class over `slices` of (parameter group index, 1-D parameter), with
    each group's options.
    """
    accepted = inspect.signature(type(prototype).__init__).parameters
    defaults = {key: value for key, value in prototype.defaults.items() if key in accepted}
    groups = [{**_options(prototype.param_groups[group]), "params": [piece]} for group, piece in slices]
    return type(prototype)(groups, **defaults)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")}


class Rates:
    """The learning rates an optimizer started with, so that a schedule's factor can be applied to them."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self._first = [_copy(group["lr"]) for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        """Every group's rate becomes `factor` times what it was at first."""
        for group, first in zip(self.optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * factor


def _copy(option: Any) -> Any:
    return option.clone() if isinstance(option, torch.Tensor) else option


def coupled_decays(optimizer: Optimizer) -> list[float]:
    """Of each parameter group, the multiple of the parameters that the optimizer adds to the gradient it is handed; 0
    where it decays them apart from the gradient, or is no kin of torch's own."""
    if not any(_is_known(cls) for cls in type(optimizer).__mro__):
        return [0.0] * len(optimizer.param_groups)
    decays = []
    for group in optimizer.param_groups:
        coupled = not group.get("decoupled_weight_decay", False)
        sign = -1.0 if group.get("maximize", False) else 1.0  # where the gradient is turned round first
        decays.append(sign * group.get("weight_decay", 0.0) * coupled)
    return decays


@contextlib.contextmanager
def scaled(optimizer: Optimizer, rate: float, decay: float = 1.0) -> Iterator[None]:
    """For as long as the context lasts, multiply every group's learning rate by `rate`, and by `decay` the weight decay
    that goes by way of the gradient."""
    before = [
        (group, key, group[key])
        for group in optimizer.param_groups
        for key in ("lr", "weight_decay")
        if key in group
    ]
    for group, coupled in zip(optimizer.param_groups, coupled_decays(optimizer), strict=True):
        if rate != 1.0:
            group["lr"] = group["lr"] * rate
        if decay != 1.0 and coupled:
            group["weight_decay"] = group["weight_decay"] * decay
    try:
        yield
    finally:
        for group, key, value in before:
            group[key] = value


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
