"""What differs between the versions of torch that this package runs with (2.13 on); nothing else asks for a version.

Muon's iteration is a private function that other versions may have elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MUON_ITERATION = "_zeropower_via_newtonschulz"


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torch's Muon."""
    return isinstance(optimizer, torch.optim.Muon)


def muon_iteration() -> Callable[..., Any] | None:
    """What orthogonalises a matrix for Muon; None where this torch does not have it where it is looked for."""
    found: Callable[..., Any] | None = getattr(getattr(torch.optim, "_muon", None), _MUON_ITERATION, None)
    return found


def set_muon_iteration(iteration: Callable[..., Any]) -> None:
    """Put another function in its place."""
    setattr(torch.optim._muon, _MUON_ITERATION, iteration)
