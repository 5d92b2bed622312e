"""Runs in which every rank calls the whole module and torch's DTensors hold its shards: what `tensor` and
`sharded` have in common.

Invariants: the ranks enter every forward pass together, in training and in validation, because layers talk in
it; a rank that has no batch left calls it with one that does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.training.model_parallel.base import SplitRun
from mpitrain.training.model_parallel.state_shards import local, whole_tensor
from mpitrain.training.model_parallel.whole_matrices import check_muon, whole_matrices
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.stepper import Batch
from mpitrain.training.validation import add_up, batches_of, losses_of, open_validation


class MeshRun(SplitRun):
    """One rank of a run over a device mesh; `module` has been sharded already."""

    def __init__(
        self,
        session: Session,
        grid: Grid,
        share: int,
        reports_loss: bool,
        device: torch.device,
        module: nn.Module,
    ):
        super().__init__(session, grid, share, reports_loss, device)
        self.module = module

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """As `SplitRun.use`.

        Raises:
            UsageError: on all ranks, a Muon that cannot be kept to whole matrices.
        """
        attempt(self.session.runtime, lambda: check_muon(optimizer))
        super().use(optimizer)

    rescales_first = False  # FSDP2 keeps whole gradients to itself until they are exchanged

    def exchange(self, whether: bool) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(whether, recurse=False)

    def step_optimizer(self) -> None:
        with whole_matrices(self.optimizer):
            super().step_optimizer()

    def num_copies(self, gradient: torch.Tensor) -> int:
        size = self.session.runtime.size
        if not isinstance(gradient, DTensor):
            return size
        pairs = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
        return size // math.prod(parts for placement, parts in pairs if not placement.is_replicate())

    def gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.module.parameters() if p.grad is not None]

    def measure(self) -> dict[str, float]:
        job = self.session.job
        with open_validation(job, self.session.validation) as reader:
            batches = self._rounds(batches_of(job, reader))
            own = ((batch, counts and self.reports_loss) for batch, counts in batches)
            tally = add_up(self.module, own, self.device, lambda batch: losses_of(job, self.module, batch))
        return self.sum_up(tally)

    def _rounds(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """(batch, whether it is this rank's to count), equally many on all ranks: each share takes every
        `num_replicas`-th batch, and in an incomplete last round those left over repeat its first."""
        first: Batch = {}
        own: Batch | None = None
        number = -1
        for number, batch in enumerate(batches):
            turn = number % self.num_replicas
            if turn == 0:
                first, own = batch, None
            if turn == self.share:
                own = batch
            if turn == self.num_replicas - 1:
                assert own is not None
                yield own, True
        if (number + 1) % self.num_replicas:
            yield (first, False) if own is None else (own, True)

    def gather(self) -> dict[str, torch.Tensor]:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):  # validation has left its parameters together
                part.reshard()
        # torch warns of what a gathering over two dimensions costs; it happens once
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        whole = {}
        for name, tensor in self.module.state_dict().items():
            full = whole_tensor(tensor)
            if self.rank == 0:
                whole[name] = full.detach().cpu()
        return whole

    def describe(self) -> dict[str, Any]:
        return {"parameters": sum(local(parameter).numel() for parameter in self.module.parameters())}
