"""Models that torch compiles.

Invariants: a model is compiled in place, so its parameters keep their names. One that a job has compiled itself is
taken out of torch's wrapper, which would rename them, and is called as compiled all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compile_in_place(module: nn.Module, how: bool | str) -> None:
    """Compile `module` at its first call; a text names the backend."""
    if how:
        backend = "inductor" if how is True else how
        _call_compiled(module, lambda call: torch.compile(call, backend=backend))


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module under its plain names, where the job has called `torch.compile` on it or on some of its layers."""
    module = _plain(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            parent._modules[name] = _plain(child)
    return module


def _plain(module: Any) -> Any:
    if not (hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx")):
        return module
    _call_compiled(module._orig_mod, module.dynamo_ctx)
    return module._orig_mod


def _call_compiled(module: Any, compiling: Callable[[Any], Any]) -> None:
    """As `nn.Module.compile`, which leaves out a forward pass that is torch's own, such as that of `nn.Sequential`: a
    function of this file is compiled with all that it calls."""

    def call(*inputs: Any, **named: Any) -> Any:
        return module._call_impl(*inputs, **named)

    module._compiled_call_impl = compiling(call)
