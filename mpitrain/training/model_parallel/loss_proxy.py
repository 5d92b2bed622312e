"""Loss proxies: what the job's loss is called with where no rank holds the whole model.

Invariants: `loss(model, batch)` stays as it is. It may call the model once and do nothing else with it; the proxy of
the first stage records what goes into the model, that of the last stage returns what came out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mpitrain.data.read.batch import Batch, describe, num_samples_in
from mpitrain.errors import UsageError


class _ModelCalled(Exception):
    """The loss has called the model; ends the loss."""

    def __init__(self, inputs: tuple[Any, ...]):
        super().__init__("the model was called")
        self.inputs = inputs


class _LossProxy:
    @property
    def module(self) -> Any:
        """The model itself, as `naming_itself` has it."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"the loss or the metrics ask for model.{name}: under pipeline() no rank holds the whole model, so they "
            "may only call it"
        )


class _InputProxy(_LossProxy):
    def __call__(self, *inputs: Any, **named: object) -> NoReturn:
        if named:
            raise UsageError(
                f"the loss calls the model with {', '.join(named)}=: under pipeline() inputs are positional"
            )
        raise _ModelCalled(inputs)


class _OutputProxy(_LossProxy):
    def __init__(self, output: object):
        self.__dict__["output"] = output

    def __call__(self, *inputs: Any, **named: object) -> Any:
        return self.__dict__["output"]


def model_inputs(loss: Callable[[Any, Batch], Any], batch: Batch) -> tuple[torch.Tensor, ...]:
    """What `loss` calls the model with for this batch.

    Raises:
        UsageError: it does not call the model, or with something that cannot be cut into microbatches.
    """
    try:
        loss(_InputProxy(), batch)
    except _ModelCalled as call:
        inputs = call.inputs
    else:
        raise UsageError("the loss never called the model")
    num_samples = num_samples_in(batch)
    if num_samples is None:
        raise UsageError(
            f"pipeline: how many samples a batch has does not show in {describe(batch)}; take another strategy"
        )
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != num_samples:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"input {index} of the model is {shape}: under pipeline() every input is a tensor with one row for "
                f"each of the {num_samples} samples"
            )
    return inputs


def call_with_output(function: Callable[[Any, Batch], Any], output: object, batch: Batch) -> Any:
    """`function(model, batch)` where the model's output is known."""
    return function(_OutputProxy(output), batch)
