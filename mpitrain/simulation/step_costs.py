"""What the steps of a job cost under strategies whose ranks all take them together: which collectives there are, and
over how many bytes.

Invariants: it asks the functions that a run asks: how DDP forms buckets, how layers become units, slices and stages.
What a part of a model takes of the time of a batch is its share of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import Batch
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.building.layer_cuts import slices, units
from mpitrain.model.building.pipeline_stages import split_stages
from mpitrain.simulation.collective_costs import Collectives
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel
from mpitrain.torch_versions import ddp_buckets
from mpitrain.training.model_parallel.loss_proxy import model_inputs
from mpitrain.virtual.collectives import Cost
from mpitrain.virtual.compute import BatchCourse
from mpitrain.virtual.lockstep import Bucket, Overlapped, Schedule
from mpitrain.virtual.split_steps import PipelineSteps, ShardedSteps, Unit

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's


def gradient_buckets(
    parameters: Sequence[nn.Parameter], sparse: Container[int] = frozenset()
) -> list[list[int]]:
    """Which gradients DDP reduces together, by the numbers of the parameters, in its order from the second step on:
    that in which gradients come, the last layer's first. A sparse gradient, `sparse` by the parameter's `id`, is a
    bucket of its own."""
    backwards = list(reversed(range(len(parameters))))
    if not parameters:
        return []
    found = ddp_buckets(
        [parameters[index] for index in backwards],
        [FIRST_BUCKET_BYTES, BUCKET_BYTES],
        [id(parameters[index]) in sparse for index in backwards],
    )
    return [[backwards[place] for place in bucket] for bucket in found]


def num_bytes_of(tensors: Sequence[torch.Tensor], cast: torch.dtype | None = None) -> int:
    """Of all of them together, as another type if one is given."""
    return sum(tensor.numel() * (cast or tensor.dtype).itemsize for tensor in tensors)


def overlapped(
    bucket_bytes: Sequence[int], costs: Sequence[Cost], course: BatchCourse, at_end: bool = False
) -> Overlapped:
    """The backward pass of an allreduce. A bucket is ready when the law of the batches says so, or else after the share
    of the pass that its bytes, and those of the buckets before it, are of all. `at_end`: nothing is exchanged before
    the last gradient is there."""
    total, done = sum(bucket_bytes), 0
    ready = list(course.ready)
    if at_end:
        ready = [1.0] * len(costs)
    elif len(ready) != len(costs):
        ready = [(done := done + num_bytes) / total for num_bytes in bucket_bytes]
    return Overlapped([Bucket(*one) for one in zip(ready, costs, strict=True)], course.forward_share)


def split_schedule(
    job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch, forward_share: float
) -> Schedule:
    """The steps of a job under a strategy that splits the model.

    Args:
        batch: of as many samples as a rank computes at once; for the sizes of activations.
        forward_share: of the time of a batch.

    Raises:
        UsageError: the model cannot be split like this.
    """
    strategy = job.strategy
    assert isinstance(strategy, Split)
    return strategy.choose(_SCHEDULES)(job, module, grid, costs, batch, forward_share)


def _sharded(
    job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch, forward_share: float
) -> Schedule:
    units = _units(module, grid.ranks[0], [row[0] for row in grid.ranks], costs)
    return ShardedSteps(units, forward_share=forward_share)


def _units(
    module: nn.Module, ranks: Sequence[int], copies: Sequence[int], costs: Collectives, divisor: int = 1
) -> list[Unit]:
    """FSDP2's units over `ranks`: what is in no layer is one, gathered first and kept. `copies`: who holds the same
    shard as the first one; divisor: into how many slices parameters are cut already."""
    layers = [list(layer.parameters()) for layer in units(module)]
    in_layers = {id(parameter) for layer in layers for parameter in layer}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
    total = sum(parameter.numel() for parameter in module.parameters()) or 1
    found = []
    for number, group in enumerate([rest, *layers]):
        if not group:
            continue
        share, held = sum(one.numel() for one in group) / total, num_bytes_of(group) // divisor
        trained = num_bytes_of([one for one in group if one.requires_grad]) // divisor
        gather_s = costs.allgather(held, ranks).seconds
        reduce_s = costs.reduce_scatter(trained, ranks).seconds if trained else 0.0
        reduce_s += costs.allreduce(-(-trained // len(ranks)), copies).seconds if trained else 0.0
        found.append(Unit(share, gather_s, reduce_s, stays=number == 0))
    return found


def _tensor(
    job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch, forward_share: float
) -> Schedule:
    """Slices of layers: their collectives wait for nobody's computing, and are waited for."""
    plan = slices(module, job.tensor_plan, grid.num_parts)
    ranks = grid.ranks[0]
    sizes = activation_bytes(job, module, batch, plan)
    added_s = 0.0
    for name, way in plan.items():
        given, returned = sizes.get(name, (0, 0))
        if way == "row":
            added_s += costs.allreduce(returned, ranks).seconds
            continue
        added_s += costs.allreduce(given, ranks).seconds  # the gradient of its input
        if way == "gather":
            added_s += costs.allgather(returned, ranks).seconds
    sliced = sum(one.numel() for name in plan for one in module.get_submodule(name).parameters())
    total = sum(one.numel() for one in module.parameters()) or 1
    part = 1.0 - sliced / total + sliced / total / grid.num_parts
    column = [row[0] for row in grid.ranks]
    if grid.num_replicas == 1:
        return ShardedSteps([Unit(part, 0.0, 0.0, stays=True)], added_s, forward_share)
    replicated = _units(module, column, column[:1], costs, grid.num_parts)
    units = [one._replace(share=one.share * part) for one in replicated]
    return ShardedSteps(units, added_s, forward_share)


def _pipeline(
    job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch, forward_share: float
) -> Schedule:
    strategy = job.strategy
    assert isinstance(strategy, Pipeline)
    stages = split_stages(module, grid.num_parts, job.stages)
    total = sum(stage.num_parameters for stage in stages) or 1
    shares = [stage.num_parameters / total for stage in stages]
    activations: Any = model_inputs(job.loss, batch)
    message_s, was_training = [], module.training
    module.eval()  # running statistics are left alone
    with torch.no_grad():
        for index, stage in enumerate(stages[:-1]):
            activations = stage.module(*activations)
            activations = activations if isinstance(activations, tuple) else (activations,)
            travels = -(-num_bytes_of(activations) // strategy.microbatches)
            message_s.append(costs.message_s(travels, grid.ranks[0][index], grid.ranks[0][index + 1]))
    module.train(was_training)
    average_s = []
    for index, stage in enumerate(stages):
        alike = [row[index] for row in grid.ranks]
        trained = [one for one in stage.module.parameters() if one.requires_grad]
        buckets = gradient_buckets(trained)
        sizes = [num_bytes_of([trained[place] for place in bucket]) for bucket in buckets]
        average_s.append(sum(costs.allreduce(size, alike).seconds for size in sizes))
    return PipelineSteps(
        grid.ranks, shares, strategy.microbatches, strategy.schedule, message_s, average_s, forward_share
    )


def activation_bytes(
    job: Job, module: nn.Module, batch: Batch, names: Sequence[str] | dict[str, str]
) -> dict[str, tuple[int, int]]:
    """By the name of a layer, the bytes of what it is given and of what it returns for a batch."""
    found: dict[str, tuple[int, int]] = {}

    def note(name: str) -> Any:
        def hook(_layer: nn.Module, given: Any, returned: Any) -> None:
            floats = [one for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
            before = found.get(name, (0, 0))
            found[name] = before[0] + num_bytes_of(floats), before[1] + num_bytes_of([returned])

        return hook

    handles = [module.get_submodule(name).register_forward_hook(note(name)) for name in names]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            job.loss(module, batch)
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return found


def check_split(job: Job, number: int) -> Split:
    """The job's strategy, which splits the model, for so many ranks.

    Raises:
        UsageError: the ranks cannot be divided, or the batch cannot be cut.
    """
    assert isinstance(job.strategy, Split)
    if number < job.strategy.num_parts(number):
        raise UsageError(f"{job.strategy}: needs {job.strategy.num_parts(number)} workers, got {number}")
    job.strategy.check_workers(number)
    job.strategy.check_batch(job.batch_size)
    return job.strategy


_SCHEDULES: dict[type[Strategy], Callable[..., Schedule]] = {
    Pipeline: _pipeline,
    TensorParallel: _tensor,
    Sharded: _sharded,
}
