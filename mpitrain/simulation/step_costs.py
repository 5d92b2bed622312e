"""What the steps of a job cost under strategies whose ranks all take them together: which collectives there are, over
how many bytes, and by which algorithm.

Invariants: it asks the functions that a run asks: how DDP forms buckets, which algorithm carries an allreduce, how
layers become units, slices and stages. What a part of a model takes of the time of a batch is its share of the
parameters.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.layer_cuts import slices, units
from mpitrain.model.pipeline_stages import split_stages
from mpitrain.model.sparse_gradients import row_bytes
from mpitrain.mpi.allreduce_plan import AUTO, Transport, pinned
from mpitrain.mpi.process_group.algorithm_choice import adds_up, choose, index_bytes
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel
from mpitrain.training.model_parallel.loss_proxy import model_inputs
from mpitrain.virtual.collectives import Cost, LinkCost, allgather, allreduce_cost, reduce_scatter
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.lockstep import Bucket, Overlapped, Schedule
from mpitrain.virtual.network import NetworkLaw
from mpitrain.virtual.split_steps import PipelineSteps, ShardedSteps, Unit

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's

Batch = dict[str, torch.Tensor]


class Collectives:
    """Costs of the collectives of a run.

    Args:
        network: between ranks; nodes: of every rank.
    """

    def __init__(self, network: NetworkLaw, nodes: Sequence[int]):
        self.network, self.nodes = network, nodes
        self.used: dict[int, str] = {}  # bytes of an allreduce: its algorithm
        self._layouts: dict[tuple[int, ...], tuple[list[list[int]], LinkCost, LinkCost]] = {}

    def allreduce(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of so many bytes over these ranks, by the algorithm that a run would take."""
        if len(ranks) == 1:
            return Cost(0.0, 0)
        layout, inside, between = self._layout(ranks)
        slowest = between if len(layout) > 1 else inside
        transport = Transport.modelled(slowest.alpha_s, slowest.beta_s)
        self.used[num_bytes] = algorithm = choose(num_bytes, layout, transport, pinned() or AUTO)
        return allreduce_cost(algorithm, [len(node) for node in layout], num_bytes, inside, between)

    def allgather(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of parts that are so many bytes together."""
        return allgather(len(ranks), num_bytes, self._slowest(ranks))

    def sparse_allreduce(
        self, num_entries: int, num_different: int, table: torch.Tensor, ranks: Sequence[int]
    ) -> Cost:
        """Of rows of `table`, so many of all ranks together: how many each has, which they are, and their values."""
        counts = self.allreduce(8 * len(ranks), ranks)
        indices = self.allgather(num_entries * index_bytes(table.shape[:1]), ranks)
        if adds_up(num_entries, num_different):
            values = self.allreduce(num_different * row_bytes(table), ranks)
        else:
            values = self.allgather(num_entries * row_bytes(table), ranks)
        parts = (counts, indices, values)
        return Cost(sum(part.seconds for part in parts), sum(part.sent_bytes for part in parts))

    def reduce_scatter(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of so many bytes on every rank."""
        return reduce_scatter(len(ranks), num_bytes, self._slowest(ranks))

    def message_s(self, num_bytes: int, source: int, to: int) -> float:
        """From one rank to another."""
        cost = link_cost(self.network, source, to)
        return cost.alpha_s + num_bytes * cost.beta_s

    def _slowest(self, ranks: Sequence[int]) -> LinkCost:
        layout, inside, between = self._layout(ranks)
        return between if len(layout) > 1 else inside

    def _layout(self, ranks: Sequence[int]) -> tuple[list[list[int]], LinkCost, LinkCost]:
        """(the ranks by node, the link within a node, the link between nodes)."""
        key = tuple(ranks)
        if key not in self._layouts:
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(self.nodes[rank], []).append(rank)
            layout = list(by_node.values())
            largest = max(layout, key=len)
            inside = link_cost(self.network, *largest[:2]) if len(largest) > 1 else LinkCost()
            between = LinkCost()
            if len(layout) > 1:
                between = link_cost(self.network, layout[0][0], layout[1][0], len(layout))
            self._layouts[key] = layout, inside, between
        return self._layouts[key]


def gradient_buckets(
    parameters: Sequence[nn.Parameter], sparse: Container[int] = frozenset()
) -> list[list[int]]:
    """Which gradients DDP reduces together, by the numbers of the parameters, in its order from the second step on:
    that in which gradients come, the last layer's first. A sparse gradient, `sparse` by the parameter's `id`, is a
    bucket of its own."""
    backwards = list(reversed(range(len(parameters))))
    if not parameters:
        return []
    found: Any = dist._compute_bucket_assignment_by_size(
        [parameters[index] for index in backwards],
        [FIRST_BUCKET_BYTES, BUCKET_BYTES],
        [id(parameters[index]) in sparse for index in backwards],
    )
    return [[backwards[place] for place in bucket] for bucket in found[0]]


def num_bytes_of(tensors: Sequence[torch.Tensor], cast: torch.dtype | None = None) -> int:
    """Of all of them together, as another type if one is given."""
    return sum(tensor.numel() * (cast or tensor.dtype).itemsize for tensor in tensors)


def overlapped(bucket_bytes: Sequence[int], costs: Sequence[Cost], at_end: bool = False) -> Overlapped:
    """The backward pass of an allreduce; a bucket is ready after the share of the pass that its bytes, and those of the
    buckets before it, are of all. `at_end`: nothing is exchanged before the last gradient is there."""
    total, done, buckets = sum(bucket_bytes), 0, []
    for num_bytes, cost in zip(bucket_bytes, costs, strict=True):
        done += num_bytes
        buckets.append(Bucket(1.0 if at_end else done / total, cost))
    return Overlapped(buckets)


def split_schedule(job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch) -> Schedule:
    """The steps of a job under a strategy that splits the model.

    Args:
        batch: of as many samples as a rank computes at once; for the sizes of activations.

    Raises:
        UsageError: the model cannot be split like this.
    """
    strategy = job.strategy
    assert isinstance(strategy, Split)
    if isinstance(strategy, Pipeline):
        return _pipeline(job, strategy, module, grid, costs, batch)
    if isinstance(strategy, TensorParallel):
        return _tensor(job, module, grid, costs, batch)
    assert isinstance(strategy, Sharded)
    return ShardedSteps(_units(module, grid.ranks[0], [row[0] for row in grid.ranks], costs))


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


def _tensor(job: Job, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch) -> Schedule:
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
        return ShardedSteps([Unit(part, 0.0, 0.0, stays=True)], added_s)
    replicated = _units(module, column, column[:1], costs, grid.num_parts)
    return ShardedSteps([one._replace(share=one.share * part) for one in replicated], added_s)


def _pipeline(
    job: Job, strategy: Pipeline, module: nn.Module, grid: Grid, costs: Collectives, batch: Batch
) -> Schedule:
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
    return PipelineSteps(grid.ranks, shares, strategy.microbatches, strategy.schedule, message_s, average_s)


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
