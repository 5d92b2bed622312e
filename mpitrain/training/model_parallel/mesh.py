"""Runs in which every rank calls the whole module and torch's DTensors hold its shards: what `tensor` and
`sharded` have in common.

Invariants: the ranks enter every forward pass together, in training and in validation, because layers talk in
it; a rank that has no batch left calls it with one that does not count.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mpitrain.checkpoint.tensor_file import Described, describe
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss import BatchLoss, read_loss
from mpitrain.model.gradient.loss_pass import LossPass
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.training.model_parallel.base import SplitStepper
from mpitrain.training.model_parallel.state_shards import local, whole_tensor
from mpitrain.training.model_parallel.whole_matrices import check_muon, whole_matrices
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.stepper import Batch
from mpitrain.training.validations.validation import Part, batches_of, losses_of, observe, open_validation
from mpitrain.training.validations.validation_parts import buffers_of_first


class MeshStepper(SplitStepper):
    """One rank of a run over a device mesh; what is in `root` has been sharded already."""

    def __init__(
        self,
        session: Session,
        grid: Grid,
        share: int,
        reports_loss: bool,
        device: torch.device,
        root: LossPass,
    ):
        super().__init__(session, grid, share, reports_loss, device)
        self.root, self.module = root, root.module

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """As `SplitStepper.use`.

        Raises:
            UsageError: on all ranks, a Muon that cannot be kept to whole matrices.
        """
        attempt(self.session.runtime, lambda: check_muon(optimizer))
        super().use(optimizer)

    rescales_first = False  # FSDP2 keeps whole gradients to itself until they are exchanged

    def exchange(self, whether: bool) -> None:
        for part in self.root.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(whether, recurse=False)

    def forward(self, batch: Batch) -> BatchLoss:
        returned = read_loss(self._pass(self.recipe.gradient.loss, batch))
        if isinstance(returned.total, DTensor):
            raise self._of_shards()
        return returned

    def _pass(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        """`function(model, batch)`, in which layers talk.

        Raises:
            UsageError: it computes with parameters of which this rank has a shard.
        """
        try:
            return self.root(function, batch)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise self._of_shards() from error

    def _of_shards(self) -> UsageError:
        return UsageError(
            f"{self.session.strategy}: the loss or the metrics compute with parameters of a layer outside its forward "
            "pass, where a rank holds a shard of them: do it in the layer's forward(), or take allreduce(); a penalty "
            "on the weights can be the optimizer's weight_decay"
        )

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

    def observe(self, prefix: str = "") -> Part:
        job = self.session.job
        self._reshard()
        buffers = buffers_of_first(self.session.runtime, self.module)
        with open_validation(job, self.session.validation) as reader, buffers:
            batches = self._rounds(batches_of(job, reader))
            own = ((number if self.reports_loss else None, batch) for number, batch in batches)
            part = observe(
                self.module, own, self.device,
                lambda batch: self._pass(functools.partial(losses_of, job, self.metrics), batch),
                self.validation_sizes(), prefix=prefix,
            )  # fmt: skip
        if prefix:
            self._reshard()
        return part

    def _reshard(self) -> None:
        """Forward passes have left parameters together, as they were then."""
        for part in self.root.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _rounds(self, batches: Iterator[tuple[int, Batch]]) -> Iterator[tuple[int | None, Batch]]:
        """(number, batch), equally many on all ranks: each share takes every `num_replicas`-th batch, and in an
        incomplete last round those left over repeat its first, which does not count."""
        first: Batch = None
        own: tuple[int, Batch] | None = None
        number = -1
        for number, batch in batches:
            turn = number % self.num_replicas
            if turn == 0:
                first, own = batch, None
            if turn == self.share:
                own = number, batch
            if turn == self.num_replicas - 1:
                assert own is not None
                yield own
        if (number + 1) % self.num_replicas:
            yield (None, first) if own is None else own

    def described(self) -> dict[str, Described]:
        self._reshard()
        # torch warns of what a gathering over two dimensions costs; it happens once
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._state = self.module.state_dict()
        return describe(self._state)

    def gather(self, name: str) -> torch.Tensor:
        return whole_tensor(self._state[name]).detach()

    def describe(self) -> dict[str, Any]:
        return {"parameters": sum(local(parameter).numel() for parameter in self.module.parameters())}
