"""`mpitrain train JOB --dry-run`: who would do what, and what would travel, without MPI.

Invariants: it asks the same pure functions that the run asks (roles, layout, dealing), so what it
prints is what will happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.preflight import look
from mpitrain.errors import EXIT_OK, UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.model import check_optimizer
from mpitrain.model.building.deferred import Deferred
from mpitrain.model.wire.flat import make_layout
from mpitrain.planning.codecs import describe_server_codecs, message_sizes
from mpitrain.planning.model_parallel import describe_split
from mpitrain.planning.node_memory import MARGIN, most_on_a_node, needs_of, proposed
from mpitrain.planning.serverless import describe_serverless
from mpitrain.planning.tables import describe_reduced, describe_tables
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.placement import Roles, allot, assign
from mpitrain.system.saying import say
from mpitrain.system.sizes import counted, size_text
from mpitrain.system.trace import file_name
from mpitrain.training.job_file import load_job
from mpitrain.training.measure import build, build_module, build_optimizer
from mpitrain.training.memory import describe_memory, libraries_bytes
from mpitrain.training.resuming.initial_weights import RandomNumbers, start_from
from mpitrain.training.routes import choose_routes
from mpitrain.training.validate import validate_run


@dataclass(frozen=True)
class Machine:
    """The nodes a plan is made for, where their shape decides how many ranks there are.

    Attributes:
        num_nodes: all nodes, those for servers included.
        workers_per_node: workers on each node that has any: its GPUs.
        num_server_nodes: nodes of a heterogeneous job's first component, which serve.
        hosts: the nodes' names; empty where they are not known.
    """

    num_nodes: int
    workers_per_node: int
    num_server_nodes: int = 0
    hosts: tuple[str, ...] = ()

    def nodes(self, strategy: Strategy) -> tuple[int, ...]:
        """Node index of every rank."""
        placement = strategy.placement
        return allot(
            self.num_nodes, self.workers_per_node, strategy.num_servers(), placement, self.num_server_nodes,
            strategy.aggregates,
        )  # fmt: skip


def dry_run_command(
    path: str,
    overrides: Overrides,
    num_ranks: int,
    num_nodes: int,
    machine: Machine | None = None,
    hosts_file: str | None = None,
    settings: Sequence[str] = (),
) -> int:
    """`--dry-run`: prints the plan; returns the exit code.

    With `hosts_file` it also writes one line a rank, the name of its node, as `srun --distribution=arbitrary` and
    `mpirun --hostfile` read it.
    """
    job = apply_overrides(load_job(path, settings), overrides)
    say(describe(job, overrides, num_ranks, num_nodes, machine))
    if hosts_file:
        assert machine is not None
        lines = "".join(f"{machine.hosts[node]}\n" for node in machine.nodes(job.run_strategy))
        Path(hosts_file).write_text(lines, encoding="utf-8")
    return EXIT_OK


def block_nodes(num_ranks: int, num_nodes: int) -> tuple[int, ...]:
    """Node of every rank when ranks fill the nodes in blocks that differ by at most one, the way Slurm and
    `mpirun --map-by` do.

    Raises:
        UsageError: fewer ranks than nodes.
    """
    if not 1 <= num_nodes <= num_ranks:
        raise UsageError(
            f"{num_ranks} ranks cannot fill {num_nodes} nodes: every node needs at least one rank"
        )
    return tuple(rank * num_nodes // num_ranks for rank in range(num_ranks))


def describe(
    job: Job, overrides: Overrides, num_ranks: int, num_nodes: int, machine: Machine | None = None
) -> str:
    """The whole plan as text, at most 80 columns where names allow.

    Args:
        machine: where given, its shape and the strategy say how many ranks there are, and the two numbers are unused.

    Raises:
        UsageError: the run would refuse to start.
    """
    strategy = job.run_strategy
    nodes = machine.nodes(strategy) if machine else block_nodes(num_ranks, num_nodes)
    roles = check_roles(job, overrides, nodes, machine.num_server_nodes if machine else 0)
    catalogue = job.data.scan()
    if catalogue.num_samples < len(roles.workers):
        raise UsageError(f"{len(roles.workers)} workers for {catalogue.num_samples} training samples")
    before_bytes = libraries_bytes()
    module, optimizer = _build(job, overrides.lr)
    start_from(job, module, {} if strategy.splits_model else None)
    lines = [
        f"job         {job.name}, {job.epochs} epochs, batch {_batch(job)} per worker, seed {job.seed}",
        f"strategy    {strategy}  =  {strategy!r}",
        f"world       {len(nodes)} ranks on {max(nodes) + 1} node(s)",
        *([f"trace       {job.trace} of each rank, {file_name(0)} and so on"] if job.trace else []),
        "",
    ]
    if strategy.splits_model:
        split = describe_split(job, overrides, nodes, catalogue.num_samples, module)
        told = _memory(job, roles, nodes, module, optimizer, before_bytes)
        return "\n".join([*lines, *split, "", *_seen(job, catalogue), *told])
    hosts = machine.hosts if machine else ()
    lines += [*_placement(roles, nodes, hosts), "", *_data(job, overrides, catalogue, roles)]
    lines += [*_seen(job, catalogue), ""]
    lines += _messages(job, roles, module, optimizer, catalogue)
    return "\n".join(lines + _memory(job, roles, nodes, module, optimizer, before_bytes))


def check_roles(job: Job, overrides: Overrides, nodes: tuple[int, ...], num_server_nodes: int = 0) -> Roles:
    """Everybody's role on these nodes, from the job's options alone; its data and model are not looked at.

    Args:
        nodes: node index of every rank; num_server_nodes: see `Machine`.
    Raises:
        UsageError: the run would refuse to start.
    """
    strategy = job.run_strategy
    roles = assign(nodes, strategy.num_servers(), strategy.placement, num_server_nodes, strategy.aggregates)
    validate_run(job, overrides, len(roles.workers))
    return roles


def _build(job: Job, lr: float | None) -> tuple[nn.Module, Any]:
    """The job's module and optimizer; the module of a job that splits it without its large tensors, where that can
    be."""
    device, random_numbers = torch.device("cpu"), RandomNumbers()
    if job.run_strategy.splits_model:
        try:
            module = build_module(job, device, Deferred())
            return module, build_optimizer(job, module, lr)
        except UsageError:
            raise
        except Exception:  # one of the user's own is raised again
            random_numbers.restore()
    return build(job, lr, device)


def _batch(job: Job) -> str:
    return f"{job.accumulate} x {job.batch_size}" if job.accumulate > 1 else str(job.batch_size)


def _placement(roles: Roles, nodes: tuple[int, ...], hosts: tuple[str, ...]) -> list[str]:
    lines = [f"{'node':>5}  {'ranks':<12} roles"]
    for node in sorted(set(nodes)):
        ranks = [rank for rank, home in enumerate(nodes) if home == node]
        servers = [rank for rank in ranks if rank in roles.servers]
        shards = ", ".join(f"rank {rank} serves shard {roles.servers.index(rank)}" for rank in servers)
        between = [rank for rank in ranks if rank in roles.aggregators]
        workers = len(ranks) - len(servers) - len(between)
        text = f"{workers} worker(s)" + (f"; {shards}" if shards else "")
        text += "".join(f"; rank {rank} stands between them and the servers" for rank in between)
        lines.append(f"{hosts[node] if hosts else node:>5}  {f'{ranks[0]}-{ranks[-1]}':<12} {text}")
    lines.append(
        f"       rank {roles.validator} validates and saves the model"
        + (f"; rank {roles.dealer} deals batches" if roles.servers else "")
    )
    return lines


def _data(job: Job, overrides: Overrides, catalogue: Catalogue, roles: Roles) -> list[str]:
    num_workers = len(roles.workers)
    batches = -(-catalogue.num_samples // job.step_samples)
    files = len(getattr(catalogue, "files", ()))
    lines = [f"data        {catalogue.num_samples} samples in {files} shard file(s)"]
    if not roles.servers:
        steps = overrides.steps or job.epochs * -(-catalogue.num_samples // (job.step_samples * num_workers))
        lines.append(
            f"            {steps} steps of {num_workers} x {job.step_samples} samples; each worker "
            "reads its share of every shard"
        )
    else:
        assert isinstance(job.strategy, ServerStrategy)
        pushes = overrides.steps * num_workers if overrides.steps else job.epochs * batches
        if job.strategy.batching != PerWorker():
            lines.append(
                f"            batch sizes: {job.strategy.batching}, starting from {job.step_samples}"
            )
        lines.append(
            f"            {pushes} batches dealt as leases, about {pushes / num_workers:.0f} a "
            "worker; any worker may read any shard"
        )
    return lines


def _seen(job: Job, catalogue: Catalogue) -> list[str]:
    """What the samples are like, and what is surprising about them."""
    found = [("samples", look(job.data, catalogue))]
    if job.validate is not None and job.validate is not job.data:
        found.append(("validation", look(job.validate, job.validate.scan())))
    lines = []
    for what, seen in found:
        lines.append(f"{what:<12}{seen.summary()}")
        lines += [f"            {line}" for line in seen.lines()]
        lines += [f"            warning: {line}" for line in seen.warnings()]
    return lines


def _messages(job: Job, roles: Roles, module: nn.Module, optimizer: Any, catalogue: Catalogue) -> list[str]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    num_bytes, numbers = sum(one.nbytes for one in trained), sum(one.numel() for one in trained)
    lines = [f"model       {numbers:,} trainable numbers, {size_text(num_bytes)}"]
    if not roles.servers:
        return lines + describe_serverless(job, module, num_bytes, numbers, len(roles.workers))
    strategy = job.strategy
    assert isinstance(strategy, ServerStrategy)
    check_optimizer(optimizer, strategy)
    routes = choose_routes(job, module, catalogue)
    layout = make_layout(module, optimizer, len(roles.servers), strategy.reduces, str(strategy))
    if strategy.reduces:
        lines += describe_reduced(job, module, optimizer, routes, len(roles.workers))
        return [*lines, *describe_tables(job, strategy, module, catalogue)]
    numbers = layout.cuts[-1]
    push, reply = message_sizes(strategy, module, numbers, layout.wire_dtype)
    for shard, rank in enumerate(roles.servers):
        share = layout.size(shard) / max(1, numbers)
        sizes = f"push {size_text(share * push)}, reply {size_text(share * reply)}"
        lines.append(f"messages    shard {shard} (rank {rank}): {sizes}")
    pushes, pulls = _every(strategy.push_every), _every(strategy.pulls)
    sent = f"sends {size_text(push)}" + ("" if pushes == pulls else f" {pushes}")
    lines.append(f"            each worker {sent} and receives {size_text(reply)} {pulls}")
    if roles.aggregators:
        if strategy.sums_on_nodes:
            what = f"the sum of its workers' pushes, {size_text(push)} an update"
        else:
            what = "its workers' pushes, those together that have come while the server was busy"
        lines.append(f"            each of {len(roles.aggregators)} aggregator(s) sends {what}")
    lines += describe_tables(job, strategy, module, catalogue)
    lines += describe_server_codecs(strategy, module, num_bytes)
    return lines


def _memory(
    job: Job, roles: Roles, nodes: tuple[int, ...], module: nn.Module, optimizer: Any, before_bytes: float
) -> list[str]:
    needs = needs_of(job, roles, nodes, module, optimizer, may_step=not job.run_strategy.splits_model)
    if not needs:  # those of tables are told already
        return []
    most, num_ranks = most_on_a_node(needs, roles, nodes, before_bytes)
    together = f"on one node at most {counted(num_ranks, 'rank')}, {size_text(most)}; "
    asked = f"Slurm, with {100 * MARGIN:.0f} % more: {proposed(most)}"
    return [*describe_memory(needs, before_bytes), f"            {together}{asked}"]


def _every(num_batches: int) -> str:
    return "per batch" if num_batches == 1 else f"every {num_batches} batches"
