"""torch's Muon over slices of matrices.

Invariants: what is orthogonalised is the whole matrix, on every rank alike, so the bits are one process's. Over
slices torch would multiply across ranks in bfloat16, which rounds otherwise (1e-3 after eight steps) and fails for
matrices that do not divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from mpitrain.errors import UsageError
from mpitrain.torch_versions import full_version, is_muon, muon_iteration, set_muon_iteration


def check_muon(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a Muon of a torch whose iteration is not where it is looked for.

    Raises:
        UsageError: it is.
    """
    if is_muon(optimizer) and muon_iteration() is None:
        raise UsageError(
            f"Muon of torch {full_version()} cannot be kept to whole matrices where each rank holds slices; use "
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
