"""What goes wrong between a batch and a model: numbers of another kind, rows of another width, `.backward()` in the
loss. Each is told in one line, with the place in the user's code and the way out.

Invariants: nothing is looked at before something has gone wrong, but, once a model, whether its loss has left gradients
behind.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import Batch, values_of
from mpitrain.errors import UsageError
from mpitrain.system.tracebacks import is_users

# What torch says where two tensors do not go together.
_DTYPES = re.compile(
    r"same dtype|expected scalar type|Input type .* and|should be the same|Found dtype|not implemented for '|"
    r"must have the same type|Expected object of scalar type|expected tensor for argument .* scalar types"
)
_SHAPES = re.compile(
    r"cannot be multiplied|size mismatch|must match the size|expected input|weight of size|input_size|normalized_shape|"
    r"[Ee]xpected .*(?:channels|dimension|elements)|is invalid for input of size|running_mean should|must have .* dim|"
    r"batch_size \(|Expected target size|to be equal to|broadcastable|Sizes of tensors"
)
_PLAIN = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
MOST_SHOWN = 6  # values of a batch


@contextlib.contextmanager
def explaining_model(owner: str, model: object, batch: Batch) -> Iterator[None]:
    """Calls a function of the user's, `owner`, with a model and a batch that may not go together.

    Raises:
        UsageError: they do not.
    """
    try:
        yield
    except RuntimeError as error:
        text = _explained(error, owner, model, batch)
        if text is None:
            raise
        raise UsageError(text) from None


def _explained(error: RuntimeError, owner: str, model: object, batch: Batch) -> str | None:
    said = " ".join(str(error).split())
    of_dtypes = bool(_DTYPES.search(said))
    if not (of_dtypes or _SHAPES.search(said)) or not isinstance(model, nn.Module):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    if not own:
        return None
    layer = _layer(model, [frame for frame, _ in frames])
    if not (of_dtypes or layer):  # of two tensors of the function's own
        return None
    text = f"{owner}: {said} ({_place(*own[0])}"
    text += f"; {_place(*own[-1])})" if own[-1][0] is not own[0][0] else ")"
    text += f"; {layer}" * bool(layer) + f"; a batch holds {_shown(batch)}"
    if of_dtypes and (advice := _advice(model, batch)):
        text += f", {advice}"
    return text


def _place(frame: FrameType, number: int) -> str:
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    return (f"`{line}`, " if line else "") + f"{path}, line {number}"


def _layer(model: nn.Module, frames: list[FrameType]) -> str:
    """The innermost layer that was called, and the shape of what it was given."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name != "forward" or not isinstance(module, nn.Module) or id(module) not in names:
            continue
        given = frame.f_locals.get("input", frame.f_locals.get("x"))
        shape = f" was given {_kind(given)}" if isinstance(given, torch.Tensor) else ""
        named = f"layer {names[id(module)]!r}" if names[id(module)] else "the model"
        own = str(module) if not list(module.children()) else type(module).__name__
        return f"{named}, {own},{shape}" if shape else f"in {named}, {own}"
    return ""


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(batch: Batch) -> str:
    tensors = {"": batch} if isinstance(batch, torch.Tensor) else values_of(batch)
    shown = [
        f"{name}: {_kind(one)}".removeprefix(": ")
        for name, one in tensors.items()
        if isinstance(one, torch.Tensor)
    ]
    return (
        ", ".join(shown[:MOST_SHOWN]) + ", ..." * (len(shown) > MOST_SHOWN) if shown else type(batch).__name__
    )


def _advice(model: nn.Module, batch: Batch) -> str:
    """Where the model computes in other numbers than the batch has."""
    kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
    tensors = {"the batch": batch} if isinstance(batch, torch.Tensor) else values_of(batch)
    others = [
        str(name) for name, one in tensors.items()
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.dtype not in kinds
    ]  # fmt: skip
    if not others or len(kinds) != 1:
        return ""
    (kind,) = kinds
    which, made = _PLAIN.get(kind, str(kind)), ".float()" if kind == torch.float32 else f".to({kind})"
    return (
        f"and the model's parameters are {which}: make {', '.join(others)} {which} where the data are made, or with "
        f"{made} in the loss"
    )


class LooksForGradients:
    """Looks, the first time a loss is called with a model, whether that has gone backward by itself."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self._looked = function, set[int]()

    @contextlib.contextmanager
    def around(self, model: object) -> Iterator[None]:
        """Around the call.

        Raises:
            UsageError: gradients are there that were not before.
        """
        if id(model) in self._looked or not isinstance(model, nn.Module) or not torch.is_grad_enabled():
            yield
            return
        self._looked.add(id(model))
        before = _versions(model)
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        if _versions(model) != before:
            for one in model.parameters():
                one.grad = None
            raise UsageError(
                f"Job: {named(self.function)} calls .backward(), and the job calls backward: return the loss, and "
                "leave out .backward(), zero_grad() and step() (torch.autograd.grad gives gradients inside a loss; "
                "several steps a batch are for step=)"
            ) from None
        if failed is not None:
            raise failed


def _versions(model: nn.Module) -> list[tuple[int, int] | None]:
    return [None if one.grad is None else (id(one.grad), one.grad._version) for one in model.parameters()]


def named(function: Callable[..., Any]) -> str:
    """A job's loss, by the name and place of its function."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"the loss {name!r}" + (f" ({code.co_filename}, line {code.co_firstlineno})" if code else "")
