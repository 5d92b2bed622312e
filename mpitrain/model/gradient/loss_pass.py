"""The loss of a batch as one forward pass: what DDP and FSDP2 wrap is a module whose forward pass is the whole loss.

Invariants: the loss is handed the job's own model under every family, so its attributes and methods are there, and
whatever it calls of the model lies inside the forward pass in which gradients are made ready to be exchanged. The names
of the model's parameters stay its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class LossPass(nn.Module):
    """Around a model; called with a function, it calls that with the model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)`."""
        return function(self.module, *arguments)


def passed(module: nn.Module) -> nn.Module:
    """The model in a `LossPass`, or a module that is none, as it is."""
    return module.module if isinstance(module, LossPass) else module


def name_itself(model: object) -> bool:
    """From here on `model.module` is the model itself, as programs for torch's DDP write it; a model that has an
    attribute of this name keeps it. Returns whether it had none."""
    if not isinstance(model, nn.Module) or hasattr(model, "module"):
        return False
    vars(model)["module"] = model  # past nn.Module, which would make it a part of itself
    return True


@contextlib.contextmanager
def naming_itself(model: object) -> Iterator[None]:
    """`name_itself`, for as long as the block runs."""
    named = name_itself(model)
    try:
        yield
    finally:
        if named:
            vars(model).pop("module", None)
