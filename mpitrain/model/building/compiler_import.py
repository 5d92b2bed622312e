"""Optimizers made without torch's compiler.

Invariants: torch imports `torch._dynamo`, a second of CPU and 800 modules, when the first optimizer of a process is
made: `add_param_group` is marked as a function that is not to be compiled. In a process that has not imported the
compiler nothing is compiled, so there the mark may wait. A worker of parameter servers never steps its optimizer, so it
never needs the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from mpitrain.torch_versions import UNCOMPILED as KNOWN
from mpitrain.torch_versions import behind_mark, has_compiler


@contextmanager
def without_compiler() -> Iterator[None]:
    """Optimizers made in this block call `add_param_group` as it is, where the compiler has not been imported yet;
    behind the block torch is as it was."""
    add = behind_mark(Optimizer.add_param_group)
    if add is None or has_compiler() or hasattr(add, KNOWN):
        yield
        return

    def plain(*arguments: object, **options: object) -> Any:
        return add(*arguments, **options)

    setattr(add, KNOWN, plain)
    try:
        yield
    finally:
        if getattr(add, KNOWN, None) is plain:
            delattr(add, KNOWN)
