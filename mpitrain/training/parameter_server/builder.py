"""Builds the servers and workers of a run: under MPI, around a loop of the user's own, and in virtual time.

Invariants: this is the only place that knows which option of a strategy and of a job goes to which part of a server or
a worker. What differs between the three is an argument: a loop of the user's own brings its data, loss and schedule
itself, so it has no job; virtual workers share one module; what is written, reported and measured is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from mpitrain.data import Catalogue
from mpitrain.job import Job
from mpitrain.messages import Kind
from mpitrain.model import (
    ElasticStore,
    FlatModel,
    LocalSteps,
    Replica,
    ShardStore,
    local_steps,
    push_coder,
    server_steps,
    shard_store,
)
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.recipe import brought_by_loop
from mpitrain.model.replicas.hybrid_replica import HybridReplica
from mpitrain.model.replicas.reduced_parameters import ReducedParameters
from mpitrain.model.replicas.stepping_replica import ServedStepsReplica, SteppingReplica
from mpitrain.model.replicas.tabled_replica import TabledReplica
from mpitrain.model.replicas.worker_replica import Between
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.model.wire.node_sums import NodeSums
from mpitrain.roles import (
    ClippingServer,
    Duties,
    FaultTolerantServer,
    Rhythm,
    SaveRequest,
    SavingServer,
    Worker,
)
from mpitrain.roles.aggregator import Aggregator
from mpitrain.roles.failure_detector.silence import SIGNS_S
from mpitrain.roles.protocols import CheckpointWriter, Report
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.placement import Roles
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.training.measure import read_nothing_ahead
from mpitrain.training.recipe import recipe_of

AnyStore = ShardStore | ElasticStore


@dataclass(eq=False)
class RoleBuilder:
    """The parts of a run over parameter servers.

    Args:
        strategy, roles: of the run; model: the flat model that this process holds.
        job: what is trained; None around a loop of the user's own.
        catalogue: the job's training data; num_batches: how many are dealt in all, None for whole epochs.
    """

    strategy: ServerStrategy
    roles: Roles
    model: FlatModel
    job: Job | None = None
    catalogue: Catalogue | None = None
    num_batches: int | None = None

    def __post_init__(self) -> None:
        self.num_workers = len(self.roles.workers)
        epoch_samples = self.catalogue.num_samples if self.catalogue is not None else 0
        self.recipe = recipe_of(self.job, self.strategy, self.num_workers, epoch_samples)
        self._reduced: ReducedParameters | None = None  # that virtual workers share

    def others_of(self, shard: int) -> tuple[int, ...]:
        """The other servers, where this one exchanges norms with them."""
        servers = self.roles.servers
        return () if self.recipe.update.clipping.norm is None else (*servers[:shard], *servers[shard + 1 :])

    def store(self, shard: int, optimizer: Optimizer) -> AnyStore:
        """One server's shard of the model."""
        return shard_store(self.model, shard, optimizer, self.strategy, self.recipe)

    def server(
        self, shard: int, store: AnyStore, report: Report, writer: CheckpointWriter | None = None,
        floor_s: float | None = None, by_heartbeat: bool = False,
    ) -> FaultTolerantServer:  # fmt: skip
        """The server of one shard; the first one deals the batches. `floor_s`, `by_heartbeat`: as in
        `FaultTolerantServer`."""
        job = self.job
        assert job is not None and self.catalogue is not None
        dealer = None
        if self.roles.servers[shard] == self.roles.dealer:
            dealer = BatchDealer(
                self.catalogue.num_samples, job.epochs, job.step_samples, self.num_batches, job.drop_last,
                self.num_workers, self.catalogue.window_samples,
            )  # fmt: skip
        others = self.others_of(shard)
        make = functools.partial(ClippingServer, others=others) if others else FaultTolerantServer
        return make(
            self.strategy, store, self.roles.workers, report, dealer, self.recipe.update.on_nonfinite,
            store.updates.pace, writer, delivers=True, floor_s=floor_s, by_heartbeat=by_heartbeat,
        )  # fmt: skip

    def loop_server(
        self,
        store: AnyStore,
        report: Report,
        floor_s: float,
        write: Callable[[SaveRequest, dict[str, Any], list[int]], None],
    ) -> SavingServer:
        """The server of one shard around a loop of the user's own, which says when `write` writes a checkpoint."""
        return SavingServer(self.strategy, store, self.roles.workers, report, write=write, floor_s=floor_s)

    def local(self, optimizer: Optimizer) -> LocalSteps | None:
        """What a worker does between two reads, as `mpitrain.model.replicas.local_steps`."""
        return local_steps(self.model, optimizer, self.strategy, self.recipe.update)

    def replica(
        self,
        rank: int,
        optimizer: Optimizer,
        local: LocalSteps | None,
        reader: Any = None,
        measure: Callable[[int | None], dict[str, float]] | None = None,
        shared: bool = False,
    ) -> Replica:
        """The model and data of the worker on `rank`.

        Args:
            reader: of the training data; None around a loop of the user's own.
            shared: other virtual workers use the same module; virtual time waits for no disk, so nothing is read ahead.
        """
        index = self.roles.workers.index(rank)
        made: Callable[..., Replica] = Replica
        if self.strategy.reduces:
            reduced = self._reduced_parameters(optimizer, shared)
            made = functools.partial(HybridReplica, reduced=reduced, push_wire=self.strategy.push_numbers)
        elif self.recipe.gradient.step is not None and local is not None:
            made = SteppingReplica
        elif self.recipe.gradient.step is not None:
            made = functools.partial(ServedStepsReplica, optimizer=optimizer)
        elif self.model.lookups is not None:
            made = functools.partial(TabledReplica, push_wire=self.strategy.push_numbers)
        rule = self.recipe.gradient
        between = Between(
            local,
            push_coder(self.model, self.strategy, self.num_workers, index, rule.seed),
            server_steps(self.model, optimizer, self.strategy),
        )
        leases = LeaseReader(
            reader.batch if reader else brought_by_loop,
            reader.prefetch if reader and not shared else read_nothing_ahead,
            rule.part_samples,
        )
        return made(self.model, rule, leases, index, between, measure, shared)

    def _reduced_parameters(self, optimizer: Optimizer, shared: bool) -> ReducedParameters:
        if self._reduced is None or not shared:
            self._reduced = ReducedParameters(self.model.reduced, optimizer, self.recipe.update)
        return self._reduced

    def worker(
        self,
        rank: int,
        replica: Replica,
        report: Report,
        duties: Duties = Duties(),  # noqa: B008 - frozen
        heartbeat_s: float = 0.0,
        signs: bool = True,
    ) -> Worker:
        """The worker on `rank`.

        Args:
            heartbeat_s: as in `Rhythm`.
            signs: whether workers that wait say so, where the strategy asks for that; nobody listens for it where
                nobody can fall silent.
        """
        strategy, job = self.strategy, self.job
        rhythm = Rhythm.of(
            strategy,
            leased=job is not None,
            wants_final=job is not None and rank == self.roles.validator,
            batch_size=0 if job is None or strategy.batching == PerWorker() else job.step_samples,
            part_samples=self.recipe.gradient.part_samples,
            heartbeat_s=heartbeat_s,
            signs_s=SIGNS_S if strategy.blocks_apart and signs else 0.0,
        )
        return Worker(rank, self.roles, replica, report, rhythm, duties)

    def aggregator(self, rank: int, asked: Callable[[], bool] = lambda: False) -> Aggregator:
        """The aggregator on `rank`; `asked`: as in `Aggregator`."""
        sums = NodeSums(self.model.layout.wire_dtype) if self.strategy.sums_on_nodes else None
        return Aggregator(rank, self.roles.servers, self.roles.behind(rank), sums, asked)

    def buffer_for(self, server: int, kind: Kind) -> Any:
        """The buffer in which a worker receives the next message of the server on rank `server`."""
        if kind in (Kind.UNIT, Kind.MEASURED, Kind.ROWS):
            return VariableBuffer()
        if kind == Kind.AVERAGE:
            layout = self.model.layout
            return FixedBuffer(layout.size(self.roles.servers.index(server)), layout.dtype)
        return self.model.buffer_for(self.roles.servers.index(server), kind == Kind.FINAL)
