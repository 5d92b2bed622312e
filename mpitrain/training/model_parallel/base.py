"""What the steps of every model-parallel run have in common.

Invariants: whether a step is finite is agreed on by one small allreduce, because the ranks see different gradients; it
also adds up the norm by which the mean gradient is clipped. How a share becomes gradients is the subclass's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mpitrain.checkpoint.tensor_file import Described
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import OwnStep
from mpitrain.model.wire.flat import all_finite
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.training.model_parallel.state_shards import local
from mpitrain.training.recipe import recipe_of_steps
from mpitrain.training.resuming.resume_options import shapes_of
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.stepper import Stepper
from mpitrain.training.validations.validation import Part, batch_sizes, metrics_of

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


class SplitStepper(Stepper):
    """The stepper of one rank of a model-parallel run.

    Args:
        grid: everybody's place; share: which of the step's batches is this rank's; reports_loss: whether this
            rank reports the loss of its share.

    Attributes:
        checkpoint_grid: ranks in one of its columns write the same; a row is all parts of the model.
        warm_from: the first step that is measured.
    """

    holds_still = False  # whether a step leaves the parameters as they are until its update
    warm_from = 0

    def __init__(self, session: Session, grid: Grid, share: int, reports_loss: bool, device: torch.device):
        super().__init__(session.job, recipe_of_steps(session), session.runtime.rank, session.runtime.where)
        self.session, self.grid, self.share, self.reports_loss = session, grid, share, reports_loss
        self.device, self.rank = device, session.runtime.rank
        self.metrics = metrics_of(session.job)
        self.replica, self.part = grid.place(self.rank)
        self.checkpoint_grid = grid

    def validation_sizes(self) -> Callable[[int], int]:
        """Samples of the validation batch with a number."""
        catalogue = self.session.validation
        return batch_sizes(self.session.job, catalogue.num_samples if catalogue else 0)

    # ---- what subclasses do

    def observe(self, prefix: str = "") -> Part:
        """What this rank's share of the validation set gives, where it is this rank's to report; collective. `prefix`:
        of the names."""
        raise NotImplementedError

    def described(self) -> dict[str, Described]:
        """The whole model's tensors by their original names, the same on all ranks; collective."""
        raise NotImplementedError

    def gather(self, name: str) -> torch.Tensor:
        """One of those that `described` has named, whole on rank 0; collective."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What belongs in this rank's row of `result.json`."""
        return {}

    def conclude(self) -> dict[str, Any]:
        """What belongs in `result.json` besides; collective."""
        return {}

    # ---- the step

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with this optimizer, which holds this rank's parameters."""
        self.optimizer, self.rates, self.own_step = optimizer, Rates(optimizer), OwnStep(optimizer)
        self.updates = attempt(self.session.runtime, lambda: self.recipe.update.begin(self.rates, self._held))

    def judge(self, value: float, part: float) -> tuple[float, bool]:
        """(the mean loss of the step, whether everything is finite), the same on all ranks."""
        grads = self.gradients()
        finite = value - value == 0.0 and all_finite(grads)
        squares = self._squares() if finite and self.recipe.update.clipping.norm is not None else 0.0
        sums = torch.tensor(
            [value * part if self.reports_loss else 0.0, 0.0 if finite else 1.0, squares], dtype=torch.float64
        )
        dist.all_reduce(sums)
        loss, bad, squares = sums.tolist()
        self._norm = math.sqrt(squares)
        return loss, bad == 0.0

    def is_finite(self, gradients: list[torch.Tensor]) -> bool:
        """As `Stepper.is_finite`; ranks see different gradients."""
        overflown = torch.tensor([0.0 if all_finite(gradients) else 1.0])
        dist.all_reduce(overflown)
        return not overflown

    def num_copies(self, gradient: torch.Tensor) -> int:
        """How many ranks hold what this rank holds of a gradient."""
        return self.num_replicas

    def _held(self) -> list[torch.Tensor]:
        groups = self.optimizer.param_groups
        return [local(parameter).detach() for group in groups for parameter in group["params"]]

    def _stepped(self) -> list[torch.Tensor]:
        """The gradients of what this rank's optimizer holds, as they are split."""
        held = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in held if parameter.grad is not None]

    def _squares(self) -> float:
        """This rank's part of the squared norm of the mean gradient."""
        gradient = self._stepped()
        norms = torch._foreach_norm([local(one) for one in gradient]) if gradient else []
        pairs = zip(norms, gradient, strict=True)
        return sum(float(norm) ** 2 / self.num_copies(one) for norm, one in pairs)

    def clip(self) -> None:
        """As `Stepper.clip`, by the norm over all ranks; slices draw apart, and copies alike."""
        total = torch.tensor(self._norm, dtype=torch.float64)
        self.updates.shape(
            lambda: [local(one) for one in self._stepped()], total=total, parts=self._parts_of_stepped
        )

    def _parts_of_stepped(self) -> list[int]:
        """Of each gradient, which of its slices is here: copies are the same one."""
        return [self._slice_of(one) for one in self._stepped()]

    def _slice_of(self, gradient: torch.Tensor) -> int:
        if not isinstance(gradient, DTensor):
            return self.part if self.num_copies(gradient) < self.session.runtime.size else 0
        mesh, at = gradient.device_mesh, 0
        for placement, parts, place in zip(
            gradient.placements, mesh.shape, mesh.get_coordinate() or (), strict=True
        ):
            at = at if placement.is_replicate() else at * parts + place
        return at


def grid_of(session: Session) -> Grid:
    """Everybody's place in this run."""
    assert isinstance(session.strategy, Split)
    return session.strategy.grid(session.runtime.nodes)


def device_mesh(grid: Grid, device: torch.device) -> Any:
    """torch's mesh of the grid, with dimensions "replica" and "part"."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device.type, torch.tensor(grid.ranks), mesh_dim_names=("replica", "part"))


def compare_parameters(runtime: Runtime, module: nn.Module) -> list[str]:
    """All ranks have built the same model, or all leave; returns its parameters' names and shapes."""
    parameters = shapes_of(module)
    runtime.compare({"parameters": parameters})

    def check() -> None:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("the model has no parameter that requires a gradient: nothing to train")

    attempt(runtime, check)
    return parameters
