"""Masters of parameters in 16 bits: the same numbers in 32 bits, on whoever steps them.

Invariants: forward and backward passes see 16 bits, and optimizers, their hooks and their state 32: a parameter is its
master, rounded, but for as long as it is stepped. What somebody else has written into a parameter, such as a layer that
shortens its rows, goes into the master where it is more than rounding. Parameters of other dtypes are left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.strategies.base import Strategy

SIXTEEN = (torch.bfloat16, torch.float16)


class Masters:
    """Those of one process; false where there are none.

    Args:
        parameters: any; those in 16 bits get a master.
        optimizer: that steps them; what it remembers of them is widened.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer):
        narrow = [one for one in parameters if one.dtype in SIXTEEN]
        self._pairs = [(one, one.detach().float().contiguous()) for one in narrow]
        self._by_parameter = {id(one): master for one, master in self._pairs}
        for one in narrow:
            if one in optimizer.state:
                optimizer.state[one].update(widened(optimizer.state[one]))

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """What is stepped in its place: its master, or itself."""
        return self._by_parameter.get(id(parameter), parameter)

    @torch.no_grad()
    def take_up(self) -> None:
        """What has been written into parameters since they were rounded."""
        for one, master in self._pairs:
            torch.where(master.to(one.dtype) == one, master, one.to(master.dtype), out=master)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """For as long as the context lasts the parameters are their masters, and so are their gradients."""
        self.take_up()
        own = [(one.data, one.grad) for one, _ in self._pairs]
        for (one, master), (_, gradient) in zip(self._pairs, own, strict=True):
            _become(one, master, None if gradient is None else gradient.to(master.dtype))
        try:
            yield
        finally:
            for (one, _), (data, gradient) in zip(self._pairs, own, strict=True):
                _become(one, data, None if one.grad is None else gradient)
            if own:
                torch._foreach_copy_([data for data, _ in own], [master for _, master in self._pairs])


def keeps_masters(strategy: Strategy) -> bool:
    """Servers and peers do."""
    return strategy.sends_messages


def without_masters(module: nn.Module, strategy: Strategy) -> str:
    """What to tell of a model in 16 bits whose optimizer steps it as it is; empty where there is nothing to tell."""
    if keeps_masters(strategy):
        return ""
    named = [(name, one.dtype) for name, one in module.named_parameters() if one.requires_grad]
    narrow = [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in named if dtype in SIXTEEN]
    if not narrow:
        return ""
    return (
        f"{strategy}: {narrow[0]}, and torch's own optimizer steps it as it is: what 16 bits do not hold of an update "
        'is lost. Servers and peers keep 32-bit masters, as does a model of float32 under precision="bfloat16"'
    )


def _become(parameter: nn.Parameter, data: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None  # torch wants it to be of the parameter's dtype
    parameter.data = data
    parameter.grad = gradient


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In 32 bits, where it is in 16; itself otherwise."""
    return tensor.float() if tensor.dtype in SIXTEEN else tensor


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer remembers of a parameter, with 32 bits in place of 16."""
    return {key: wide(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
