"""Building a split model layer by layer: every rank has the module, whose large tensors are made when they are asked
for, and kept where they belong.

Invariants: the values are those that rank 0 would give a module that is built whole, be they drawn by the constructor
or read from a file. A module that cannot be built so is built whole, and rank 0 reports why; then its constructor has
run twice on the ranks where it failed, from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mpitrain.errors import UsageError
from mpitrain.model.building.deferred import Deferred, held_by
from mpitrain.model.in_place import refuse_renormed
from mpitrain.mpi.process_group.broadcast import broadcast_tensors
from mpitrain.strategies.features import MPI, why_not
from mpitrain.system.memory import available_bytes, give_large_blocks_back
from mpitrain.training.agree import attempt
from mpitrain.training.measure import build_module
from mpitrain.training.resuming.initial_weights import (
    RandomNumbers,
    WeightsFile,
    start_from,
    warn_without_masters,
)

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.training.session import Session

COPIES = 4  # of the parameters: themselves, gradients, two moments
HARDLY = 2 / 3


class Layers:
    """Makes the tensors of a module that was built without its large ones.

    Args:
        runtime: of all ranks, which get the values of rank 0; device: where the tensors are to be.
        deferred: makes them; weights: from which file and by which name rank 0 takes which tensor instead.
    """

    def __init__(self, runtime: Runtime, deferred: Deferred, device: torch.device):
        self.runtime, self.deferred, self.device = runtime, deferred, device
        self.weights: dict[int, tuple[WeightsFile, str]] = {}  # by the id of a tensor that the module holds

    def fill(self, module: nn.Module) -> None:
        """Collective: make all parameters and buffers of a part of the module that are not distributed already."""
        self.share(tensor for tensor in held_by(module) if not isinstance(tensor, DTensor))

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Collective: make these on every rank."""
        tensors = list(tensors)
        attempt(self.runtime, lambda: self.make(tensors))
        broadcast_tensors(self.runtime, tensors)

    def make(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make these on this rank; on rank 0 with the weights of the file."""
        for tensor in tensors:
            self.deferred.fill([tensor], self.device)
            self._load(tensor, tensor)

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor; one that is still to be made stays so."""
        value = self.deferred.made(tensor, self.device) if self.deferred.holds(tensor) else tensor
        self._load(tensor, value)
        return value

    @torch.no_grad()
    def _load(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if (found := self.weights.pop(id(tensor), None)) is not None:
            file, name = found
            value.copy_(file[name])


def build_by_layers(session: Session, device: torch.device) -> tuple[nn.Module, Layers]:
    """Collective: the job's module on every rank, and what makes its large tensors. A module that cannot be built
    without them is whole, and rank 0 reports why.

    Raises:
        AgreedError: as `build_on_ranks`.
    """
    runtime, job = session.mpi, session.job
    deferred, built = Deferred(), list[nn.Module]()
    random_numbers = RandomNumbers()

    def whole_because() -> str:
        if isinstance(job.model, nn.Module):
            return "the job holds a module; a function that makes one can be built layer by layer"
        try:
            built.append(build_module(job, device, deferred))
        except UsageError:
            raise
        except Exception as error:  # one of the user's own is raised again when the module is built whole
            return str(error).partition("\n")[0] or type(error).__name__
        return ""

    def whole() -> None:
        if built:  # other ranks are to do the same
            deferred.fill(held_by(built[0]), device)
        else:
            deferred.make_leftovers()
            random_numbers.restore()
            built.append(build_module(job, device))

    reasons = [one for one in runtime.allgather(attempt(runtime, whole_because)) if one]
    if reasons:
        if runtime.rank == 0:
            session.report.event("every rank builds the whole model first", because=reasons[0])
        attempt(runtime, whole)
    elif deferred.built_at_once and runtime.rank == 0:
        session.report.event(
            "every rank builds a part of the model whole first", because=deferred.built_at_once
        )
    attempt(runtime, lambda: refuse_renormed(built[0], why_not("changes in place", session.strategy, MPI)))
    warn_without_masters(session, built[0])
    _mind_memory(session, built[0])
    module, layers = built[0], Layers(runtime, deferred, device)
    if job.init is not None and session.resume is None:
        fields = attempt(
            runtime, lambda: start_from(job, module, layers.weights) if runtime.rank == 0 else {}
        )
        if runtime.rank == 0:
            session.report.event("initial weights", **fields)
    return module, layers


def _mind_memory(session: Session, module: nn.Module) -> None:
    """Where the whole model would hardly fit, memory comes before speed."""
    runtime = session.runtime
    whole = sum(one.numel() * one.element_size() * COPIES for one in module.parameters())
    available = available_bytes(runtime.nodes.count(runtime.nodes[runtime.rank]))
    if whole > available * HARDLY and give_large_blocks_back() and runtime.rank == 0:
        sizes = {"whole_model_bytes": whole, "available_bytes": int(available)}
        session.report.event("memory is scarce: freed blocks go back to the system at once", **sizes)
