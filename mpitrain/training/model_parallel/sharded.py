"""`sharded()`: torch's FSDP2 over our process group.

Invariants: the units whose parameters travel together are the layers of the model, found by looking into
containers; a parameter that several of them share stays with the root. A rank holds one whole layer at a time, also
while the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from mpitrain.model.building.layer_cuts import units
from mpitrain.model.gradient.loss_pass import LossPass
from mpitrain.mpi.process_group.process_group import default_group
from mpitrain.training.measure import build_optimizer
from mpitrain.training.model_parallel.base import compare_parameters, device_mesh, grid_of
from mpitrain.training.model_parallel.layers import build_by_layers
from mpitrain.training.model_parallel.mesh import MeshStepper
from mpitrain.training.model_parallel.trainer import train_split
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.resuming.resume_options import describe_optimizer
from mpitrain.training.session import Session


def run_sharded(session: Session) -> RunOutcome:
    """Train with sharded parameters; returns what this rank knows of the run."""
    runtime, job = session.mpi, session.job
    grid = grid_of(session)
    device = session.device
    module, builder = build_by_layers(session, device)
    parameters = compare_parameters(runtime, module)
    with default_group(runtime):
        mesh = device_mesh(grid, device)
        root = shard_module(module, mesh if grid.num_replicas > 1 else mesh["part"], builder.fill)
        del builder  # with its records
        stepper = MeshStepper(session, grid, runtime.rank, True, device, root)
        stepper.use(build_optimizer(job, module, session.overrides.lr))
        return train_split(session, stepper, parameters, describe_optimizer(module, stepper.optimizer))


def shard_module(
    module: nn.Module, mesh: Any, make: Callable[[nn.Module], None], leave: Collection[nn.Module] = ()
) -> LossPass:
    """`fully_shard` on the module's layers but for those to `leave`, then on the rest; each is handed to `make` just
    before. Returns the pass by which all of it is called: the rest is whole within it, whatever the loss calls."""
    for unit in units(module):
        if unit not in leave:
            make(unit)
            fully_shard(unit, mesh=mesh)
    make(module)
    root = LossPass(module)
    fully_shard(root, mesh=mesh)
    return root
