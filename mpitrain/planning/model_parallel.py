"""The dry run of strategies that split the model: who would hold what, and what would travel.

Invariants: it asks the functions that the run asks (grid, stages, slices, units).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.job import Job, Overrides
from mpitrain.model.building.layer_cuts import slices, units
from mpitrain.model.building.pipeline_stages import split_stages
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel
from mpitrain.training.memory import Need, sizes_of


def describe_split(
    job: Job, overrides: Overrides, nodes: tuple[int, ...], num_samples: int, module: nn.Module
) -> list[str]:
    """Placement, steps, model and messages, as lines.

    Raises:
        UsageError: the model cannot be split like this.
    """
    strategy = job.strategy
    assert isinstance(strategy, Split)
    grid = strategy.grid(nodes)
    shares = strategy.num_replicas(len(nodes))
    steps = overrides.steps or job.epochs * -(-num_samples // (job.step_samples * shares))
    return [
        *_placement(strategy, grid, nodes),
        "       rank 0 logs and saves the model",
        "",
        f"data        {num_samples} samples; {steps} steps of {shares} x {job.step_samples}",
        "",
        *_model(strategy, job, grid, module),
    ]


def split_needs(
    strategy: Split, job: Job, nodes: tuple[int, ...], module: nn.Module, optimizer: Optimizer
) -> list[Need]:
    """What the rank that holds most has in memory; [] where the optimizer's state is not known.

    Args:
        nodes: node index of every rank; module: whole, or with tensors that are still to be made.
    """
    sizes = sizes_of(module, optimizer, strategy, may_step=False)
    if sizes.optimizer is None:
        return []
    held_of = strategy.choose(_HELD)
    held, gathered = held_of(job, strategy.grid(nodes), module)
    share = held / max(1, sizes.parameters)
    in_slices = (
        isinstance(strategy, Pipeline) or not sizes.step
    )  # else the tensors of a step are torch's DTensors
    parts = {
        "parameters": held,
        "gradients": share * sizes.trained,
        "optimizer": share * sizes.optimizer,
        "layers as a whole": gathered,
        "the optimizer's step": sizes.step if in_slices else 2 * share * sizes.largest,
    }
    return [Need("worker", parts, ("parameters", "optimizer"))]


def _stage_bytes(job: Job, grid: Grid, module: nn.Module) -> tuple[float, float]:
    """Of the fullest stage, and of what is gathered: with several pipelines each gradient once more, in its bucket."""
    stages = split_stages(module, grid.num_parts, job.stages)
    largest = max((one.nbytes for one in module.parameters()), default=0)
    return max(_bytes_of(stage.module) for stage in stages), largest if grid.num_replicas > 1 else 0


def _slice_bytes(job: Job, grid: Grid, module: nn.Module) -> tuple[float, float]:
    """Of the slices and of all that is not sliced; with several models FSDP2 shards these once more."""
    sliced = 0.0
    for name, way in slices(module, job.tensor_plan, grid.num_parts).items():
        layer = module.get_submodule(name)
        whole = {"bias"} if way == "row" else set()
        sliced += sum(one.nbytes for kind, one in layer.named_parameters(recurse=False) if kind not in whole)
    held = _bytes_of(module) - sliced * (1 - 1 / grid.num_parts)
    return held / grid.num_replicas, _unit_bytes(module) if grid.num_replicas > 1 else 0.0


def _shard_bytes(job: Job, grid: Grid, module: nn.Module) -> tuple[float, float]:
    """Of a shard, and of two layers at once, the gradient of one of them beside it."""
    return _bytes_of(module) / grid.num_parts, _unit_bytes(module)


def _unit_bytes(module: nn.Module) -> float:
    """Of the layers that FSDP2 puts together: one with its gradient, and the next one's parameters."""
    found = [_bytes_of(unit) for unit in units(module)]
    largest = sorted([*found, _bytes_of(module) - sum(found), 0.0], reverse=True)
    return 2 * largest[0] + largest[1]


def _bytes_of(module: nn.Module) -> float:
    return float(sum(parameter.nbytes for parameter in module.parameters()))


def _placement(strategy: Split, grid: Grid, nodes: tuple[int, ...]) -> list[str]:
    whole, part, _ = strategy.choose(_PARTS)
    lines = [f"{'node':>5}  {'ranks':<12} roles"]
    for node in sorted(set(nodes)):
        ranks = [rank for rank, home in enumerate(nodes) if home == node]
        lines.append(f"{node:>5}  {f'{ranks[0]}-{ranks[-1]}':<12} {len(ranks)} worker(s)")
        for rank in ranks:
            replica, index = grid.place(rank)
            lines.append(f"{'':>20} rank {rank} holds {part} {index} of {whole} {replica}")
    return lines


def _model(strategy: Split, job: Job, grid: Grid, module: nn.Module) -> list[str]:
    total = sum(parameter.numel() for parameter in module.parameters())
    _, _, describe = strategy.choose(_PARTS)
    return [f"model       {total:,} numbers", *describe(strategy, job, grid, module)]


def _stages(strategy: Pipeline, job: Job, grid: Grid, module: nn.Module) -> Iterator[str]:
    for index, stage in enumerate(split_stages(module, grid.num_parts, job.stages)):
        yield f"            stage {index}: {stage.num_parameters:,} numbers"
    pieces = f"{strategy.microbatches} pieces of {job.batch_size // strategy.microbatches} samples"
    yield f"messages    activations of {pieces} to the next stage, their gradients back"
    if grid.num_replicas > 1:
        yield f"            each stage's gradients averaged over {grid.num_replicas} pipelines"
    yield f"bubble      {100 * strategy.bubble:.0f} % of a step idle, where stages take equally long"


def _slices(strategy: TensorParallel, job: Job, grid: Grid, module: nn.Module) -> Iterator[str]:
    for name, way in slices(module, job.tensor_plan, grid.num_parts).items():
        yield f"            {name}: {way}, 1/{grid.num_parts} per rank"
    yield "messages    an allreduce of activations for each row layer, and of gradients for each column"
    if grid.num_replicas > 1:
        yield f"            gradients averaged over {grid.num_replicas} models by FSDP2"


def _shards(strategy: Sharded, job: Job, grid: Grid, module: nn.Module) -> Iterator[str]:
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    held = num_bytes / grid.num_parts
    yield f"            {held:,.0f} B of parameters per rank in {len(units(module)) + 1} units"
    yield "messages    each unit's parameters gathered twice a step, its gradients reduced and scattered once"
    if grid.num_replicas > 1:
        yield f"            and averaged over {grid.num_replicas} replicas"


_HELD: dict[type[Strategy], Callable[[Job, Grid, nn.Module], tuple[float, float]]] = {
    Pipeline: _stage_bytes, TensorParallel: _slice_bytes, Sharded: _shard_bytes
}  # fmt: skip

# A family, what it calls the ranks of one model, what it calls a rank's part, and what it says of model and messages.
_PARTS: dict[type[Strategy], tuple[str, str, Callable[[Any, Job, Grid, nn.Module], Iterator[str]]]] = {
    Pipeline: ("pipeline", "stage", _stages),
    TensorParallel: ("model", "slice", _slices),
    Sharded: ("replica", "shard", _shards),
}
