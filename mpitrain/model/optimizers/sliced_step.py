"""The step of an elementwise optimizer slice by slice: a slice and its state stay in the caches through all operations
of the step, and what these make meanwhile is as large as a slice, not as the largest tensor.

Invariants: the bits are those of the step of whole tensors. The optimizer's state is that of whole tensors before and
after the step; between, it holds that of the slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.model.pieces import Piece, cut

SLICE_BYTES = 4 << 20


class SlicedStep:
    """Steps `optimizer`, which looks at one element at a time, by calling `step` for each slice.

    Args:
        step: the optimizer's own, of all parameters that its groups hold.
    """

    slice_bytes = SLICE_BYTES

    def __init__(self, optimizer: Optimizer, step: Callable[[], object]):
        self._optimizer, self._step = optimizer, step
        self._slices: list[nn.Parameter] = []  # used again: making one costs as much as stepping a small one

    def __call__(self) -> None:
        """Step every parameter that has a gradient: small ones together, then the large ones."""
        groups = self._optimizer.param_groups
        held = [group["params"] for group in groups]
        large = [[one for one in parameters if self._is_large(one)] for parameters in held]
        if not any(large):
            self._step()
            return
        try:
            for group, parameters, apart in zip(groups, held, large, strict=True):
                group["params"] = [one for one in parameters if not any(one is other for other in apart)]
            if any(group["params"] for group in groups):
                self._step()
            for group in groups:
                group["params"] = []
            for group, apart in zip(groups, large, strict=True):
                for parameter in apart:
                    self._step_slices(group, parameter)
        finally:
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters

    def _is_large(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        return (
            _may_be_cut(parameter)
            and gradient is not None
            and not gradient.is_sparse
            and parameter.is_contiguous()
            and gradient.is_contiguous()
        )

    def _step_slices(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        gradient, values = parameter.grad, parameter.detach()
        assert gradient is not None, "or it is not large"
        states: Any = self._optimizer.state
        before = dict(states.pop(parameter, {}))  # which every slice begins with
        after = dict(before)
        try:
            for number, piece in enumerate(cut([parameter], self.slice_bytes)):
                one = self._slice(number, *piece.of([values]), *piece.of([gradient]))
                group["params"] = [one]
                if before:
                    states[one] = {key: _part(value, parameter, piece) for key, value in before.items()}
                self._step()
                for key, value in states.pop(one, {}).items():
                    _put(after, key, value, parameter, one, piece)
            torch.autograd.graph.increment_version(parameter)  # a slice has a count of its own
        finally:
            group["params"] = []
            for one in self._slices:
                one.grad = None
                states.pop(one, None)
            if after:
                states[parameter] = after

    def _slice(self, number: int, values: torch.Tensor, gradient: torch.Tensor) -> nn.Parameter:
        if number == len(self._slices):
            self._slices.append(nn.Parameter(values))
        one = self._slices[number]
        one.data, one.grad = values, gradient
        return one


def has_large(optimizer: Optimizer) -> bool:
    """Whether there is anything to step in slices."""
    return any(_may_be_cut(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _may_be_cut(parameter: torch.Tensor) -> bool:
    """On an accelerator one kernel after the other would be waited for; of what only looks like a tensor others know
    how it lies."""
    return (
        parameter.nbytes > SlicedStep.slice_bytes
        and type(parameter) is nn.Parameter
        and parameter.device.type in ("cpu", "meta")
    )


def _part(value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """What a slice's state has of the whole tensor's: a view, or a number of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return piece.of([value])[0] if value.shape == parameter.shape else value.clone()


def _put(
    after: dict[str, Any], key: str, value: Any, parameter: torch.Tensor, one: torch.Tensor, piece: Piece
) -> None:
    """Have the whole tensor's state hold what the slice's does."""
    if not isinstance(value, torch.Tensor) or value.shape != one.shape:
        after[key] = value
        return
    if key not in after or not isinstance(after[key], torch.Tensor):
        after[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    (whole,) = piece.of([after[key]])
    if whole.data_ptr() != value.data_ptr():
        whole.copy_(value)
