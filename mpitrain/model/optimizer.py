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


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot run on slices.

    Raises:
        UsageError: its class is not one of torch's elementwise optimizers and does not declare itself
            `elementwise = True`.
    """
    cls = type(optimizer)
    known = cls.__module__.startswith("torch.optim") and cls.__name__ in ELEMENTWISE
    if not known and not getattr(cls, "elementwise", False):
        raise UsageError(
            f"optimizer {cls.__name__} cannot run on a parameter server: a server owns slices that "
            "cut through layers, so only "
            f"elementwise optimizers keep their meaning there ({', '.join(ELEMENTWISE)}). Use "
            "strategy allreduce, or set "
            f"`{cls.__name__}.elementwise = True` if each element's update depends on that element alone"
        )


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


@contextlib.contextmanager
def scaled_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply every group's learning rate by `factor` for as long as the context lasts."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
