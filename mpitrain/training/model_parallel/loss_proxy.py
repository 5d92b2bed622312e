"""What the job's loss is handed where no rank holds the whole model: stand-ins that ask it for the model's input and
give it the model's output.

Invariants: `loss(model, batch)` stays as it is. It may call the model once and do nothing else with it; the
first stage learns from that call what goes into the model, the last one answers it with what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mpitrain.data.read.ragged import num_samples_in
from mpitrain.errors import UsageError

Batch = dict[str, torch.Tensor]


class _Asked(Exception):
    """The loss has called the model; ends the loss."""

    def __init__(self, inputs: tuple[Any, ...]):
        super().__init__("the model was called")
        self.inputs = inputs


class _StandIn:
    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"the loss or the metrics ask for model.{name}: under pipeline() no rank holds the whole model, so they "
            "may only call it"
        )


class _Probe(_StandIn):
    def __call__(self, *inputs: Any, **named: Any) -> NoReturn:
        if named:
            raise UsageError(
                f"the loss calls the model with {', '.join(named)}=: under pipeline() inputs are positional"
            )
        raise _Asked(inputs)


class _Answer(_StandIn):
    def __init__(self, output: Any):
        self.__dict__["output"] = output

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.__dict__["output"]


def model_inputs(loss: Callable[[Any, Batch], Any], batch: Batch) -> tuple[torch.Tensor, ...]:
    """What `loss` calls the model with for this batch.

    Raises:
        UsageError: it does not call the model, or with something that cannot be cut into microbatches.
    """
    try:
        loss(_Probe(), batch)
    except _Asked as asked:
        inputs = asked.inputs
    else:
        raise UsageError("the loss never called the model")
    num_samples = num_samples_in(batch)
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != num_samples:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"input {index} of the model is {shape}: under pipeline() every input is a tensor with one row for "
                f"each of the {num_samples} samples"
            )
    return inputs


def with_output(function: Callable[[Any, Batch], Any], output: Any, batch: Batch) -> Any:
    """`function(model, batch)` where the model's output is known."""
    return function(_Answer(output), batch)
