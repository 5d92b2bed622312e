"""`tensor(parallel=K)`: torch's tensor parallelism over our process group; several models side by side are averaged by
FSDP2 along the other dimension of the mesh.

Invariants: ranks that hold one model take the same batch and the same random numbers. A layer is made whole on all
ranks, cut, and let go before the next one is made, so slicing needs no message.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mpitrain.model.building.layer_cuts import slices
from mpitrain.model.gradient.loss_pass import LossPass
from mpitrain.mpi.process_group.process_group import default_group
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.training.measure import build_optimizer
from mpitrain.training.model_parallel.base import compare_parameters, device_mesh, grid_of
from mpitrain.training.model_parallel.layers import build_by_layers
from mpitrain.training.model_parallel.mesh import MeshStepper
from mpitrain.training.model_parallel.sharded import shard_module
from mpitrain.training.model_parallel.trainer import train_split
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.resuming.resume_options import describe_optimizer
from mpitrain.training.session import Session, attempt


def run_tensor(session: Session) -> RunOutcome:
    """Train with sliced layers; returns what this rank knows of the run."""
    runtime, job = session.mpi, session.job
    grid = grid_of(session)
    replica, part = grid.place(runtime.rank)
    runtime.role = f"slice {part} of model {replica}"
    device = session.device
    module, layers = build_by_layers(session, device)
    parameters = compare_parameters(runtime, module)
    plan = attempt(runtime, lambda: slices(module, job.tensor_plan, grid.num_parts))
    with default_group(runtime):
        mesh = device_mesh(grid, device)
        for name, way in plan.items():
            layer = module.get_submodule(name)
            layers.fill(layer)
            parallelize_module(layer, mesh["part"], _style(way), src_data_rank=None)
            _let_whole_go(layer)
        root = LossPass(module)
        if grid.num_replicas > 1:
            # a sliced layer returns a view, on which a later in-place function would undo FSDP2's hook
            sliced_layers = [module.get_submodule(name) for name in plan]
            root = shard_module(module, mesh["replica"], layers.fill, sliced_layers)
        else:
            layers.fill(module)
        del layers  # with its records
        stepper = MeshStepper(session, grid, replica, part == 0, device, root)
        stepper.own_gradients.worker = grid.ranks[replica][0]
        if grid.num_replicas > 1:  # FSDP2 shards the slices once more: every rank holds something else
            stepper.checkpoint_grid = Grid((tuple(rank for row in grid.ranks for rank in row),))
        optimizer = build_optimizer(job, module, session.overrides.lr)
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False  # one call cannot take sliced and whole parameters together
        stepper.use(optimizer)
        sliced = [
            f"{entry}, {plan.get(entry.split()[0].rpartition('.')[0], 'whole')}" for entry in parameters
        ]
        return train_split(session, stepper, sliced, describe_optimizer(module, stepper.optimizer))


def _let_whole_go(layer: nn.Module) -> None:
    """A slice of rows is a view, behind which the whole matrix would stay in memory."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor) and (held := parameter.to_local().detach()).nbytes < _behind(held):
            mesh, placements = parameter.device_mesh, parameter.placements
            size, stride = parameter.size(), parameter.stride()
            own = DTensor.from_local(
                held.clone(), mesh, placements, run_check=False, shape=size, stride=stride
            )
            setattr(layer, name, nn.Parameter(own, requires_grad=parameter.requires_grad))


def _behind(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())


def _style(way: str) -> Any:
    if way == "gather":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if way == "column" else RowwiseParallel()
