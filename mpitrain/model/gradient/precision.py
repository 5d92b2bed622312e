"""Forward passes and losses in 16-bit numbers, parameters and everything else in 32-bit ones.

Invariants: autocast surrounds the job's own functions and nothing else, so parameters, gradients, sums, optimizers,
messages and the saved model are float32 under every strategy. Where gradients of float16 overflow, the batch is
computed again with a smaller loss scale: no sample is lost, and all ranks that exchange gradients see the overflow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.model.gradient.accumulation import scale_gradients
from mpitrain.model.wire.flat import all_finite

T = TypeVar("T")
START, LARGEST, STEPS_TO_GROW = 2.0**16, 2.0**24, 2000  # as torch's GradScaler


def autocast(precision: str, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Where torch computes in `precision` what it can."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=getattr(torch, precision))


def autocast_forward(module: nn.Module, precision: str, device_type: str) -> None:
    """Compute every forward pass of `module` in `precision`, where it is called outside the job's functions."""
    forward = module.forward

    def computed(*inputs: Any, **named: object) -> Any:
        with autocast(precision, device_type):
            return forward(*inputs, **named)

    if precision != "float32":
        module.forward = computed


def check_float32(module: nn.Module, precision: str) -> None:
    """Refuse parameters on which autocast would have no effect, or that are no 32-bit masters.

    Raises:
        UsageError: names one.
    """
    if precision == "float32":
        return
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise UsageError(
                f"precision={precision!r} computes with 32-bit parameters in 16 bits, and {name} is "
                f"{str(parameter.dtype).removeprefix('torch.')}; make the model with float32 parameters, or leave "
                "precision out"
            )


class LossScale:
    """What the loss is multiplied by, so that small gradients are numbers in float16 and large ones do not overflow."""

    def __init__(self) -> None:
        self.factor, self._num_steps = START, 0

    def shrink(self) -> bool:
        """The gradient has overflowed. False where that is no fault of the scale."""
        self._num_steps = 0
        if self.factor <= 1.0:
            self.factor = START
            return False
        self.factor /= 2.0
        return True

    def count_step(self) -> None:
        """The gradient is finite."""
        self._num_steps += 1
        if self._num_steps >= STEPS_TO_GROW:
            self.factor, self._num_steps = min(2.0 * self.factor, LARGEST), 0


def loss_scale(precision: str) -> LossScale | None:
    """The scale that this precision needs."""
    return LossScale() if precision == "float16" else None


def backward_scaled(
    scale: LossScale | None,
    module: nn.Module,
    backward: Callable[[float], T],
    gradients: Callable[[], list[torch.Tensor]],
    is_finite: Callable[[list[torch.Tensor]], bool] = all_finite,
) -> T:
    """What `backward(factor)` returns, which leaves the gradient of `factor` times the loss on the parameters of
    `module`; here it ends up unscaled. `is_finite` is the same on all ranks that exchange gradients."""
    if scale is None:
        return backward(1.0)
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    while True:
        factor = scale.factor
        returned, found = backward(factor), gradients()
        if is_finite(found):
            scale.count_step()
            break
        if not scale.shrink():
            break
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, kept in before:
                buffer.copy_(kept)
    scale_gradients(found, 1.0 / factor)
    return returned
