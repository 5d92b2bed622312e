"""What a job's own functions make, looked at where it is made: a mistake is reported in the job's words, not torch's.

Invariants: nothing here changes what the functions return, and a mistake is a `UsageError`, which every rank that makes
it raises and one of them prints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import Batch, device_of, num_samples_in
from mpitrain.data.read.batch_mistakes import explaining
from mpitrain.errors import UsageError
from mpitrain.model.building.compiling import unwrap_compiled
from mpitrain.model.gradient.loss import read_loss
from mpitrain.model.gradient.loss_pass import naming_itself
from mpitrain.model.gradient.model_mistakes import LooksForGradients, explaining_model, named
from mpitrain.model.gradient.precision import autocast

BatchFunction = Callable[[Any, Batch], Any]


class Checked:
    """A job's function of (model, batch), with the mistakes that its batches show.

    Args:
        function: the job's own; name: the field of `Job` it stands in.
        precision: in which torch computes what the function asks for, as in `Job`.

    Raises:
        UsageError: when called: the batch was taken for something else, or does not go with the model; the loss goes
            backward itself, is no scalar (nor such a sum with its weight), or has no gradient; the metrics are no
            numbers by name; what is predicted has not a row for each sample.
    """

    def __init__(self, function: BatchFunction, name: str, precision: str = "float32"):
        self.function, self.name, self.precision = function, name, precision
        self._looks = LooksForGradients(function)

    def __call__(self, model: object, batch: Batch) -> Any:
        with (
            self._looks.around(model) if self.name == "loss" else contextlib.nullcontext(),
            explaining(f"Job: {self.name}", batch, UsageError),
            explaining_model(f"Job: {self.name}", model, batch),
            autocast(self.precision, device_of(batch).type),
            naming_itself(model),
        ):
            value = self.function(model, batch)
        if self.name == "loss":
            _check_loss(value, self.function)
        elif self.name == "predict":
            _check_predictions(value, num_samples_in(batch))
        elif self.name == "metrics":
            _check_metrics(value)
        return value


def unwrapped(function: Any) -> Any:
    """The job's own function."""
    return function.function if isinstance(function, Checked) else function


def _check_loss(returned: object, function: BatchFunction) -> None:
    value = read_loss(returned).total
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"Job: loss must return a tensor of one number, got {type(value).__name__}; return the mean over the "
            "batch, without .item()"
        )
    if value.numel() != 1:
        raise UsageError(
            f"Job: loss must return one number, got a tensor of shape {tuple(value.shape)}; return its mean over the "
            "batch"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise UsageError(
            f"Job: what {named(function)} returns does not depend on any parameter that is trained; compute it from "
            "model(...), without .detach(), .data or torch.no_grad()"
        )


def _check_predictions(returned: object, num_samples: int | None) -> None:
    named = returned if isinstance(returned, Mapping) else {"": returned}
    for name, value in named.items():
        what = f"Job: predict[{name!r}]" if name else "Job: predict"
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{what} must be a tensor with a row for each sample, or a dict of such, got {type(value).__name__}"
            )
        if value.dim() == 0 or num_samples not in (None, len(value)):
            raise UsageError(
                f"{what} must have a row for each of the batch's {num_samples or ''} samples, got a tensor of shape "
                f"{tuple(value.shape)}"
            )
    if not named:
        raise UsageError("Job: predict has returned no tensor")


def _check_metrics(returned: object) -> None:
    if not isinstance(returned, Mapping):
        raise UsageError(
            f'Job: metrics must return a dict such as {{"accuracy": mean}}, got {type(returned).__name__}'
        )
    for name, value in returned.items():
        number = isinstance(value, torch.Tensor) and value.numel() == 1
        if not (number or (isinstance(value, Real) and not isinstance(value, torch.Tensor))):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise UsageError(
                f"Job: metric {name!r} must be one number, the mean over the batch, got {type(value).__name__}{shape}"
            )


def check_module(module: Any) -> nn.Module:
    """The module that a job has made.

    Raises:
        UsageError: it is none, or has nothing to train.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"Job: model must make a torch.nn.Module, got {type(module).__name__}")
    plain = unwrap_compiled(module)
    if not any(parameter.requires_grad for parameter in plain.parameters()):
        raise UsageError(
            f"Job: {type(plain).__name__} has no parameter to train: requires_grad is False for all of them"
        )
    return plain


def named_part(module: nn.Module, name: str) -> nn.Module:
    """The part of the model whose optimizer has this name.

    Raises:
        UsageError: there is none.
    """
    try:
        return module.get_submodule(name)
    except AttributeError:
        parts = ", ".join(repr(part) for part, _ in module.named_children())
        raise UsageError(
            f"Job: optimizer names {name!r}, and the model has no part of this name; it has {parts or 'none'}. "
            'torch.nn.ModuleDict({"generator": ..., "discriminator": ...}) makes a model of named parts'
        ) from None


def check_made_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a job has made.

    Raises:
        UsageError: it is none.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    many = isinstance(optimizer, list | tuple) and len(optimizer) > 0
    got = f"a {type(optimizer).__name__} of {len(optimizer)}" if many else type(optimizer).__name__
    raise UsageError(
        f"Job: optimizer must make one torch.optim.Optimizer, got {got}; one optimizer may have several parameter "
        'groups, each with options of its own: SGD([{"params": a, "lr": 0.1}, {"params": b, "lr": 0.01}]). Several '
        'optimizers have names and a step function: Job(optimizer={"generator": ..., "discriminator": ...}, step=...)'
    )


def unused_parameters(module: nn.Module, loss: torch.Tensor) -> list[str]:
    """Names of the trainable parameters that `loss` does not depend on, by its graph. Empty where the graph does
    not show it, since a reentrant checkpoint hides what is inside it."""
    used, seen, todo = set(), set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            return []
        if (variable := getattr(node, "variable", None)) is not None:
            used.add(id(variable))
        todo.extend(following for following, _ in node.next_functions)
    return [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in used]
