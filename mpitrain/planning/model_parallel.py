"""The dry run of strategies that split the model: who would hold what, and what would travel.

Invariants: it asks the functions that the run asks (grid, stages, slices, units).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from mpitrain.job import Job, Overrides
from mpitrain.model.building.layer_cuts import slices, units
from mpitrain.model.building.pipeline_stages import split_stages
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel


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


# A family, what it calls the ranks of one model, what it calls a rank's part, and what it says of model and messages.
_PARTS: dict[type[Strategy], tuple[str, str, Callable[[Any, Job, Grid, nn.Module], Iterator[str]]]] = {
    Pipeline: ("pipeline", "stage", _stages),
    TensorParallel: ("model", "slice", _slices),
    Sharded: ("replica", "shard", _shards),
}
