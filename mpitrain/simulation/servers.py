"""Simulate a job in virtual time: the same roles as on a cluster, real gradients, seeded times, one process.

Invariants: it composes like `training`, with the virtual world in place of MPI. All virtual workers
share one module, each with its own parameters and buffers. What it prints in seconds is virtual; only ratios
of virtual times mean something until a law has been fitted to a measurement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpitrain.effects import Role
from mpitrain.errors import UsageError
from mpitrain.inject import falls_silent
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.model import Replica, check_optimizer, flat_model
from mpitrain.model.gradient.trained_buffers import trained_buffers
from mpitrain.model.optimizers.step_hooks import StepHooks
from mpitrain.model.shards.tabled_shard import TabledStore
from mpitrain.options import settings_of
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Duties, Server
from mpitrain.roles.aggregator import summary
from mpitrain.roles.bundles import bundled
from mpitrain.roles.replay import load_order, load_run, repeat
from mpitrain.simulation.base import VirtualRun
from mpitrain.simulation.checkpoints import VirtualWriter, writers_over_servers
from mpitrain.simulation.collective_costs import all_reduces
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.parameter_server.staleness import disagreement
from mpitrain.strategies.placement import Roles, assign_workers
from mpitrain.system import background
from mpitrain.training.families import FAMILIES, run_named
from mpitrain.training.job_file import load_job
from mpitrain.training.measure import MODEL_FILE, build_optimizer, same_model
from mpitrain.training.parameter_server.builder import RoleBuilder
from mpitrain.training.routes import choose_routes
from mpitrain.training.served_tables import save_tables
from mpitrain.training.validate import validate_simulation
from mpitrain.training.validations.averaged_model import AverageFile
from mpitrain.training.validations.judge import NOBODY_LEFT
from mpitrain.training.validations.measured_tables import measured_by_workers
from mpitrain.training.validations.validation import Measure
from mpitrain.virtual import ComputeLaw, Constant, Costs, Ideal, NetworkLaw, VirtualWorld


@background.failures_raised()
def simulate_job(
    job: Job,
    options: Overrides,
    num_workers: int,
    compute: ComputeLaw = Constant(),  # noqa: B008 - frozen
    network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
    costs: Costs = Costs(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Simulate a job with everything of `options` in place; returns what `result.json` holds.

    Raises:
        UsageError: a wrong option, or what has no roles to run in virtual time.
    """
    validate_simulation(job, options, num_workers)
    if job.run_strategy.has_servers:
        return _Simulation(job, options, num_workers, compute, network, costs=costs).simulate()
    run = VirtualRun(job, options, num_workers, compute, network, costs)
    result: dict[str, Any] = run_named(job.run_strategy.choose(FAMILIES).virtual, run)
    return result


@background.failures_raised()
def simulate_again(
    run_dir: Path, options: Overrides, job: Job | None = None, path: str | None = None
) -> dict[str, Any]:
    """Repeat a recorded run: its options, its roles, its order of arrival. `path`: of its job file, if that
    has moved.

    Raises:
        UsageError: there is no such run, or it cannot be repeated.
    """
    run = load_run(run_dir)
    if job is None:
        path = path or run["job_file"] or run.get("made_in")
        if path is None:
            raise UsageError(
                f"{run_dir} was not started from a job file; give one, or call mpitrain.simulate(job, replay=...)"
            )
        job = load_job(path, settings_of(run.get("options", {})))
    recorded = dataclasses.replace(
        Overrides(**run["overrides"]), run_dir=options.run_dir, quiet=options.quiet
    )
    torch.set_num_threads(run["num_threads"])  # large sums are cut by thread, and so are their roundings
    num_workers = len(run["workers"])
    simulation = _Simulation(
        apply_overrides(job, recorded), recorded, num_workers, Constant(), Ideal(), run_dir
    )
    groups = {int(rank): tuple(workers) for rank, workers in run.get("aggregators", {}).items()}
    simulation.roles = Roles(
        tuple(run["servers"]), tuple(run["workers"]), tuple(groups), tuple(groups.values())
    )
    return simulation.simulate()


class _Simulation(VirtualRun):
    def __init__(
        self,
        job: Job,
        options: Overrides,
        num_workers: int,
        compute: ComputeLaw,
        network: NetworkLaw,
        replay: Path | None = None,
        costs: Costs = Costs(),  # noqa: B008 - frozen
    ):
        self.replay = replay
        if not isinstance(job.strategy, ServerStrategy):
            raise UsageError(
                f"{job.strategy} has no servers, and only their order of arrival is recorded for --replay: "
                "simulate the run without it"
            )
        job.strategy.check_workers(num_workers)
        if replay is not None and job.strategy.batching.measures:
            raise UsageError(
                f"{job.strategy}: batch sizes followed measured times: the order of arrival alone cannot repeat it"
            )
        super().__init__(job, options, num_workers, compute, network, costs)
        self.strategy = job.strategy
        num_servers = self.strategy.num_servers()
        self.roles, nodes = assign_workers(
            num_workers, lambda size: network.nodes(size) or (0,) * size, num_servers,
            job.strategy.placement, job.strategy.aggregates,
        )  # fmt: skip
        self.num_nodes = len(set(nodes))
        self._servers: Sequence[Server] = ()
        self.silence = falls_silent(options.injections)  # somebody falls silent

    def simulate(self) -> dict[str, Any]:
        """Run the whole job; returns what `result.json` holds."""
        job = self.job
        module, optimizer = self.build()
        choose_routes(job, module, self.catalogue)
        check_optimizer(optimizer, self.strategy)
        model = flat_model(module, optimizer, self.strategy)
        workers = self.roles.workers
        self._lay_out([model.layout.size(shard) for shard in range(len(self.roles.servers))])
        world = VirtualWorld(
            self.compute, self.network, job.seed, () if self.roles.aggregators else workers, workers,
            hosts=tuple(self.helpers),
            drive_computing=workers if self.strategy.inflight > 1 else (),
        )  # fmt: skip
        self.start(job.step_samples * self.strategy.push_every, world, warns=self.replay is None)
        num_batches = None if self.options.steps is None else self.options.steps * self.number
        builder = RoleBuilder(self.strategy, self.roles, model, job, self.catalogue, num_batches)
        with job.data.reader(self.catalogue, job.seed) as reader:
            measure = self.measure(module)
            # virtual seconds have no scale: nobody is too late, unless somebody is to fall silent
            floor_s = None if self.silence and not self.roles.aggregators else math.inf
            stores = [builder.store(shard, optimizer) for shard in range(len(self.roles.servers))]
            writers = self._writers(optimizer, module)
            self._servers = servers = [
                builder.server(
                    shard,
                    stores[shard],
                    NullReport() if shard else self.log,
                    writers.get(rank),
                    floor_s,
                )
                for shard, rank in enumerate(self.roles.servers)
            ]
            world.answer_late = dict(zip(self.roles.servers, [one.turn_away for one in servers], strict=True))
            replicas = {rank: self._replica(builder, rank, reader) for rank in self.roles.workers}
            roles = {
                rank: self._bundled(rank, self._in_order(shard, servers[shard].run()))
                for shard, rank in enumerate(self.roles.servers)
            }
            roles |= {rank: builder.aggregator(rank).run() for rank in self.roles.aggregators}
            for rank, replica in replicas.items():
                roles[rank] = self._worker(builder, rank, replica, measure, writers.get(rank))
            together = None
            if self.strategy.reduces:
                together = all_reduces(workers, _sum_for_all, self.network, len(roles))
            returned = world.run(roles, together)
        for rank, replica in replicas.items():
            replica.finish()
            returned[rank] |= {"codec": replica.statistics()} if replica.coder else {}
        for shard, one in enumerate(stores):
            if isinstance(one, TabledStore):
                save_tables(self.run_dir, shard, len(stores), job.seed, module, one.tables)
        averages = [one.updates.ema.values()[0] for one in stores if one.updates.ema is not None]
        if averages and servers[0].delivered:
            AverageFile(self.run_dir, "virtual", model.module, model.layout).write(averages)
        if model.lookups is not None:  # a job may have brought the module itself
            model.lookups.remove()
        result = self._result(returned, servers[0].delivered)
        self.log.finish(result)
        return result

    def _lay_out(self, sizes: list[int]) -> None:
        """Who computes no gradients, and which part of the parameters, in shards of these sizes, each of them holds."""
        servers, aggregators = self.roles.servers, self.roles.aggregators
        self.helpers = {rank: self.roles.of(rank) for rank in (*servers, *aggregators)}
        total = sum(sizes)
        parts = [size / total if total else 1 / len(sizes) for size in sizes]
        self.parts = dict(zip(servers, parts, strict=True))
        self.parts |= dict.fromkeys(aggregators, 1 / len(sizes))

    def _deliver(self, replica: Replica) -> dict[str, Any]:
        return {"metrics": {}, "model": str(self.save(replica.take_module()))}

    def _bundled(self, rank: int, role: Role) -> Role:
        return bundled(role, rank, self.roles.routes(rank), serves=rank in self.roles.servers)

    def _in_order(self, shard: int, role: Role) -> Role:
        return role if self.replay is None else repeat(role, load_order(self.replay, shard))

    def _replica(self, builder: RoleBuilder, rank: int, reader: Any) -> Replica:
        optimizer = build_optimizer(self.job, builder.model.module, self.options.lr)
        return builder.replica(rank, optimizer, builder.local(optimizer), reader, shared=True)

    def _writers(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[int, VirtualWriter]:
        """Of the ranks that write a part of a checkpoint."""
        if not self.writes:
            return {}
        hooked = bool(StepHooks(optimizer, ()) or trained_buffers(module))
        return writers_over_servers(
            self.checkpoints, self.strategy, self.roles, self.parts, self.state_bytes, hooked
        )

    def _worker(
        self, builder: RoleBuilder, rank: int, replica: Replica, measure: Measure | None,
        writer: VirtualWriter | None,
    ) -> Role:  # fmt: skip
        index = self.roles.workers.index(rank)
        measures = measured_by_workers(replica, measure, self.number) if measure else None
        duties = Duties(writer, lambda: self._deliver(replica), self.cadence(index), measures)
        worker = builder.worker(rank, replica, NullReport(), duties, signs=self.silence)
        return self._bundled(rank, self.stragglers[index].wrap(worker.run()))

    def _result(self, returned: dict[int, Any], delivered: dict[str, Any]) -> dict[str, Any]:
        counts = dict(returned[self.roles.dealer])
        failures = [counts.pop("failure"), "" if delivered else NOBODY_LEFT]
        failures.append(disagreement([returned[rank] for rank in self.roles.servers]))
        replayed: dict[str, Any] = {}
        if self.replay is not None and delivered:
            identical = same_model(self.replay / MODEL_FILE, self.run_dir / MODEL_FILE)
            replayed = {"replay": str(self.replay), "replay_identical": identical}
            failures.append(
                "" if identical else f"the replayed parameters differ from those of {self.replay}"
            )
        return {
            **counts,
            **self.result(counts["samples_accepted"], delivered.get("metrics", {}), *failures),
            **replayed,
            "ended_early": bool(self._servers and self._servers[0].checkpoints.ended),
            "steps": counts["version"],
            "servers": len(self.roles.servers),
            **summary(self.roles.aggregators, returned),
            "shards": [returned[rank] for rank in self.roles.servers],
            "per_worker": [returned[rank] for rank in self.roles.workers],
            "model": delivered.get("model"),
        }


def _sum_for_all(brought: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of what all workers bring, in the order of their ranks."""
    total = brought[0].clone()
    for vector in brought[1:]:
        total.add_(vector)
    return [total] * len(brought)
