"""Layers that keep their inputs only and compute the rest again in the backward pass: less memory for the
time of about one more forward pass (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).

Invariants: what is computed again is the same bits: random numbers are those of the first pass, and running statistics
move once. A layer keeps its parameters, their names and its type, so whoever looks at a model sees it as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import UsageError
from mpitrain.system.files.outside import choose_names

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layers(module: nn.Module) -> list[nn.Module]:
    """The module's layers that have parameters, found by looking into containers."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, CONTAINERS):
            found += layers(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def checkpoint_activations(module: nn.Module, which: bool | Sequence[str], compiled: bool = False) -> None:
    """Let these layers of `module` compute their activations again: all of `layers`, or those of these names, with all
    that lies in them. `compiled`: torch is to compile the model; layers with buffers are left out of that, since its
    compiler cannot put them back.

    Raises:
        UsageError: a pattern names no layer.
    """
    chosen = [one for one in layers(module) if which is True]
    for pattern in [] if isinstance(which, bool) else which:
        named = dict(module.named_modules())
        names = [name for name in choose_names(pattern, named) if name]
        if not names:
            raise UsageError(
                f"activation_checkpointing: {pattern!r} matches none of {', '.join(filter(None, named))}"
            )
        chosen += [named[name] for name in names]
    compiled = compiled or any(part._compiled_call_impl is not None for part in module.modules())
    inside = {id(part) for layer in chosen for part in layer.modules() if part is not layer}
    for layer in dict.fromkeys(chosen):
        if id(layer) not in inside:
            kind: Any = type(layer)
            apart = next(layer.buffers(), None) is not None
            layer.__class__ = _recomputing(kind, apart, compiled and apart)


@functools.cache
def _recomputing(kind: Any, holds_buffers: bool, eager: bool) -> Any:
    """The same kind of layer, which computes its forward pass again in the backward pass. A class, not a function on
    the layer: copies of a model have to call their own parameters."""

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        compute = functools.partial(kind.forward, self, **named)
        if not torch.is_grad_enabled():
            return compute(*inputs)
        if not holds_buffers:
            return checkpoint(compute, *inputs, use_reentrant=False)
        return checkpoint(
            compute,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _standing_still(self)),
        )

    if eager:
        forward = torch.compiler.disable(forward)
    same = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), same)


@contextlib.contextmanager
def _standing_still(layer: nn.Module) -> Iterator[None]:
    """Its buffers are afterwards as they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in before:
                buffer.copy_(kept)
