"""torch's Muon over slices of matrices.

Invariants: what is orthogonalised is the whole matrix, on every rank alike, so the bits are one process's. Over
slices torch would multiply across ranks in bfloat16, which rounds otherwise (1e-3 after eight steps) and fails for
matrices that do not divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from mpitrain.errors import UsageError


def check_muon(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a Muon of a torch whose iteration is not where it is looked for.

    Raises:
        UsageError: it is.
    """
    if is_muon(optimizer) and muon_iteration() is None:
        raise UsageError(
            f"Muon of torch {torch.__version__} cannot be kept to whole matrices where each rank holds slices; use "
            "allreduce(), or another optimizer"
        )


@contextlib.contextmanager
def whole_matrices(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """For as long as the context lasts, Muon gathers each matrix, and takes its slice of what comes out."""
    if not is_muon(optimizer):
        yield
        return
    torchs = muon_iteration()
    assert torchs is not None, "check_muon has refused it"

    def orthogonalise(update: Any, *options: object) -> Any:
        if not isinstance(update, DTensor):
            return torchs(update, *options)
        mesh, whole = update.device_mesh, torchs(update.full_tensor(), *options)
        everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=update.placements)

    set_muon_iteration(orthogonalise)
    try:
        yield
    finally:
        set_muon_iteration(torchs)


# ---- torch's Muon: its iteration is a private function, which other versions than 2.13 may have elsewhere.

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
