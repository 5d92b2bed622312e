"""numpy and torch for the files of this folder: each is imported when something of it is used.

A codec's file holds its value, which the command line reads, beside its encoder and its decoder. So a file here takes
`np` and `torch` from this module, and uses them in functions only: not in decorators, defaults or constants.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class Lazy:
    """Stands for a module until it is used."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and inspects objects asks for; no reason to import anything
            raise AttributeError(name)
        found = getattr(importlib.import_module(self._module), name)
        setattr(self, name, found)  # the next look-up finds it here
        return found


if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = Lazy("numpy"), Lazy("torch")

__all__ = ["np", "torch"]
