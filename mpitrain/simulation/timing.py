"""What a run of a strategy takes, by its roles alone: virtual time without gradients.

Invariants: the roles, strategies, dealers and the virtual world are those of every other run; only stores and replicas
are empty, and their payloads know nothing but their bytes. So a run takes the same virtual time, and counts the same,
to the bit, as the simulation with gradients of the same job and seed, wherever neither depends on a gradient's numbers.
Nothing is validated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.codecs.none import Uncompressed
from mpitrain.effects import Compute, Role
from mpitrain.errors import UsageError
from mpitrain.inject import Straggler, check_workers, falls_silent
from mpitrain.inject.values import Injection
from mpitrain.roles import Duties, FaultTolerantServer, Rhythm, Worker
from mpitrain.roles.aggregator import Aggregator, summary
from mpitrain.roles.bundles import bundled
from mpitrain.roles.failure_detector.silence import SIGNS_S
from mpitrain.roles.peer import Peer, PeerDuties
from mpitrain.roles.step_worker import StepWorker
from mpitrain.simulation.checkpoints import (
    Checkpoints,
    StateBytes,
    StepCheckpoints,
    VirtualWriter,
    parts_in_lockstep,
    writers_over_servers,
)
from mpitrain.simulation.collective_costs import all_reduces
from mpitrain.simulation.drawn import draw
from mpitrain.simulation.empty import (
    Bytes,
    EmptyLocalReplica,
    EmptyPeer,
    EmptyReducingReplica,
    EmptyReplica,
    EmptyStore,
    EmptySums,
    Quiet,
)
from mpitrain.simulation.workload import MASTER_BYTES, codec_of
from mpitrain.simulation.workload import Workload as Workload
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.placement import Roles, assign_workers
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.sampling.peer_partition import PeerPartition
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition
from mpitrain.strategies.schedules import Pace
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.system.trace import TraceSteps, file_name, switch
from mpitrain.virtual import ComputeLaw, Constant, Costs, Ideal, NetworkLaw, VirtualWorld
from mpitrain.virtual.all_reduces import AllReduces
from mpitrain.virtual.traces import VirtualTrace

_UNCODED = Uncompressed()
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Circumstances:
    """What else is in force.

    Args:
        injections: stragglers and faults to order.
        costs: of what is neither a gradient nor a message.
        trace: the steps whose spans each rank writes to a file of this directory.
        policy: when checkpoints are due.
    """

    injections: tuple[Injection, ...] = ()
    costs: Costs = Costs()
    trace: tuple[TraceSteps, Path] | None = None
    policy: CheckpointPolicy = CheckpointPolicy()


def time_run(
    strategy: Strategy,
    workload: Workload,
    num_workers: int,
    compute: ComputeLaw = Constant(),  # noqa: B008 - frozen
    network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
    seed: int = 0,
    under: Circumstances = Circumstances(),
) -> dict[str, Any]:
    """Run `strategy` on so many workers, or peers, in virtual time without gradients (servers come on top).

    The result is JSON-able, and the same to the byte for the same arguments.

    Raises:
        UsageError: a strategy that has no roles of its own, or more workers than samples.
    """
    run = _Timing(strategy, workload, num_workers, compute, network, seed, under)
    return run.result(strategy.choose(_ROLES)(run, strategy))


class _Timing:
    def __init__(
        self,
        strategy: Strategy,
        workload: Workload,
        number: int,
        compute: ComputeLaw,
        network: NetworkLaw,
        seed: int,
        under: Circumstances,
    ):
        if number < 1 or workload.num_samples < number:
            raise UsageError(
                f"timing needs at least one worker and at most one for each of the {workload.num_samples} samples, "
                f"got {number} workers"
            )
        strategy.check_workers(number)
        check_workers(under.injections, number)
        self.strategy, self.workload, self.number, self.seed = strategy, workload, number, seed
        self.compute, self.network = compute, network
        self.silence = falls_silent(under.injections)
        self.stragglers = (
            [Straggler(under.injections, index, seed) for index in range(number)] if under.injections else []
        )
        self.under = under
        self.parts: dict[int, float] = {}  # of the parameters that a rank holds, where it is not all of them
        self.codes, self.updates_itself = codec_of(strategy) is not None, strategy.steps_on_workers
        apart = range(number) if strategy.asynchronous else ()
        self.world = VirtualWorld(compute, network, seed, drive_computing=apart)
        self.checkpoints = self._make_checkpoints()

    def _make_checkpoints(self) -> Checkpoints:
        return Checkpoints(self.world, self.under.policy, self.under.costs, self.under.injections, self.seed)

    def _state_bytes(self) -> StateBytes:
        load = self.workload
        return StateBytes(load.num_parameters * load.number_bytes, load.optimizer_bytes, load.buffer_bytes)

    def over_servers(self, strategy: ServerStrategy) -> dict[str, Any]:
        """Servers and their workers."""
        load = self.workload
        ranks, _ = assign_workers(
            self.number, lambda size: self.network.nodes(size) or (0,) * size, strategy.num_servers(),
            strategy.placement, strategy.aggregates,
        )  # fmt: skip
        numbers = load.shard_numbers(len(ranks.servers))
        push, reply = (
            (strategy.push_numbers, strategy.push_codec),
            (strategy.reply_numbers, strategy.reply_codec),
        )
        pushes = [Bytes(load.payload_bytes(one, *push, load.push_share, "push_share")) for one in numbers]
        replies = [Bytes(load.payload_bytes(one, *reply, load.reply_share, "reply_share")) for one in numbers]
        finals = [Bytes(load.payload_bytes(one, "full", _UNCODED, None, "")) for one in numbers]
        self.world = VirtualWorld(
            self.compute, self.network, self.seed, () if ranks.aggregators else ranks.workers, ranks.workers,
            hosts=(*ranks.servers, *ranks.aggregators),
            drive_computing=ranks.workers if strategy.inflight > 1 else (),
        )  # fmt: skip
        self.checkpoints = self._make_checkpoints()
        self.silence = self.silence and not ranks.aggregators  # behind which nobody is given up
        self.parts = {
            rank: part / load.num_parameters for rank, part in zip(ranks.servers, numbers, strict=True)
        } | dict.fromkeys(ranks.aggregators, 1 / len(numbers))
        codes, writers = not strategy.reply_codec.is_none, self._writers(strategy, ranks)
        stores = [EmptyStore(*payloads, codes) for payloads in zip(replies, finals, strict=True)]
        servers = [
            self._server(strategy, ranks, shard, stores[shard], writers.get(rank))
            for shard, rank in enumerate(ranks.servers)
        ]
        self.world.answer_late = dict(zip(ranks.servers, [one.turn_away for one in servers], strict=True))
        roles = {
            rank: bundled(server.run(), rank, ranks.routes(rank), serves=True)
            for rank, server in zip(ranks.servers, servers, strict=True)
        }
        for rank in ranks.aggregators:
            sums = EmptySums() if strategy.sums_on_nodes else None
            roles[rank] = Aggregator(rank, ranks.servers, ranks.behind(rank), sums).run()
        for index, rank in enumerate(ranks.workers):
            worker = self._worker(strategy, ranks, rank, pushes, writers.get(rank))
            role = self._straggling(index, worker.run())
            roles[rank] = bundled(role, rank, ranks.routes(rank), serves=False)
        together = self._all_reduces(ranks.workers, len(roles)) if strategy.reduces else None
        self._observe({rank: ranks.of(rank) for rank in sorted(roles)})
        returned = self.world.run(roles, together)
        shards = [returned[rank] for rank in ranks.servers]
        counts = dict(shards[0])
        return {
            **counts,
            "samples": counts["samples_accepted"],
            "steps": counts["version"],
            "servers": len(shards),
            **summary(ranks.aggregators, returned),
            "bytes_in": [one["pushed_bytes"] for one in shards],
            "bytes_out": [one["replied_bytes"] for one in shards],
            "shards": shards,
            "per_worker": [returned[rank] for rank in ranks.workers],
        }

    def _writers(self, strategy: ServerStrategy, ranks: Roles) -> dict[int, VirtualWriter]:
        if not self.checkpoints.are_due:
            return {}
        return writers_over_servers(self.checkpoints, strategy, ranks, self.parts, self._state_bytes())

    def _server(
        self,
        strategy: ServerStrategy,
        ranks: Roles,
        shard: int,
        store: EmptyStore,
        writer: VirtualWriter | None,
    ) -> FaultTolerantServer:
        load, dealer = self.workload, None
        if ranks.servers[shard] == ranks.dealer:
            num_batches = None if load.steps is None else load.steps * self.number
            dealer = BatchDealer(
                load.num_samples, load.epochs, load.step_samples, num_batches, load.drop_last, self.number,
                load.window_samples or None,
            )  # fmt: skip
        pace = Pace(ticks=Ticks(load.num_samples, Law(load.step_samples, self.number)))
        return FaultTolerantServer(
            strategy, store, ranks.workers, Quiet(), dealer, "stop", pace, writer, delivers=True,
            floor_s=None if self.silence else math.inf,
        )  # fmt: skip

    def _worker(
        self,
        strategy: ServerStrategy,
        ranks: Roles,
        rank: int,
        pushes: list[Bytes],
        writer: VirtualWriter | None,
    ) -> Worker:
        load = self.workload
        rhythm = Rhythm.of(
            strategy, wants_final=rank == ranks.validator,
            batch_size=0 if strategy.batching == PerWorker() else load.step_samples,
            part_samples=strategy.samples_at_once(load.part_samples, self.number),
            signs_s=SIGNS_S if strategy.blocks_apart and self.silence else 0.0,
        )  # fmt: skip
        replica = (
            EmptyReducingReplica(pushes, load.reduced_bytes) if strategy.reduces else EmptyReplica(pushes)
        )
        return Worker(rank, ranks, replica, Quiet(), rhythm, Duties(writer, lambda: {"metrics": {}}))

    def among_peers(self, strategy: Decentralized) -> dict[str, Any]:
        """Peers without a server."""
        load = self.workload
        message = Bytes(
            load.payload_bytes(load.num_parameters, "full", strategy.codec, load.push_share, "push_share")
        )
        masters = replace(load, number_bytes=max(MASTER_BYTES, load.number_bytes))
        model = Bytes(masters.payload_bytes(load.num_parameters, "full", _UNCODED, None, ""))
        parts = [self._course(rank, strategy) for rank in range(self.number)]
        peers = [
            Peer(
                rank, self.number, strategy, part, EmptyPeer(message, model), Quiet(),
                PeerDuties(
                    part_samples=load.part_samples,
                    checkpoints=self.checkpoints.of_peer(rank, self.number, strategy, self._state_bytes()),
                ),
            )
            for rank, part in enumerate(parts)
        ]  # fmt: skip
        rows = self._run([peer.run() for peer in peers])
        return {
            "accepted": sum(one["batches"] for one in rows),
            "samples": parts[0].samples,
            "samples_left_out": parts[0].num_left_out,
            "steps": parts[0].step,
            "messages": sum(one["messages"] for one in rows),
            "averagings": rows[0]["averagings"],
            "max_steps_ahead": max(one["max_steps_ahead"] for one in rows),
            "bytes_sent": [one["sent_bytes"] for one in rows],
            "per_worker": rows,
        }

    def local_sgd(self, strategy: LocalSGD) -> dict[str, Any]:
        """Workers that average now and then."""
        replicas = [EmptyLocalReplica(strategy, self.workload) for _ in range(self.number)]
        load = self.workload
        partitions = (
            StepPartition(
                load.num_samples, load.step_samples, self.number, load.num_samples, load.drop_last, (rank,)
            )
            for rank in range(self.number)
        )
        courses = [StepCourse(partition, load.epochs, load.steps) for partition in partitions]
        workers = [
            StepWorker(rank, course, replica, Quiet(), load.part_samples)
            for rank, (course, replica) in enumerate(zip(courses, replicas, strict=True))
        ]
        if self.checkpoints.are_due:
            first, parts = replicas[0], parts_in_lockstep(self.number, self._state_bytes(), apart=True)
            first.on_settled = StepCheckpoints(
                self.checkpoints, parts, lambda: first.samples, lambda: not first.is_apart
            ).write_due
        everybody = range(self.number)
        rows = self._run([worker.run() for worker in workers], self._all_reduces(everybody, self.number))
        return {
            "accepted": courses[0].step * self.number,
            "samples": replicas[0].samples,
            "samples_left_out": courses[0].num_left_out,
            "steps": courses[0].step,
            "averagings": replicas[0].num_averagings,
            "per_worker": rows,
        }

    def _all_reduces(self, ranks: Sequence[int], num_ranks: int) -> AllReduces:
        return all_reduces(ranks, _nobody_asks, self.network, num_ranks)

    def _course(self, rank: int, strategy: Decentralized) -> PeerPartition:
        load = self.workload
        return PeerPartition(
            load.num_samples, load.epochs, load.step_samples, self.number, rank, load.steps, load.drop_last,
            strategy.warmup,
        )  # fmt: skip

    def _run(self, roles: Sequence[Role], together: AllReduces | None = None) -> list[dict[str, Any]]:
        followed = {rank: self._straggling(rank, role) for rank, role in enumerate(roles)}
        self._observe(dict.fromkeys(followed, self.strategy.worker_role))
        returned = self.world.run(followed, together)
        return [returned[rank] for rank in range(self.number)]

    def _observe(self, names: Mapping[int, str]) -> None:
        """Charge for what costs time, and record what is traced; `names`: the role of every rank."""
        world = self.world
        if self.under.costs != Costs():
            world.charge, world.push_s = self._charge, self.under.costs.push_s
        if self.under.trace is None:
            return
        steps, folder = self.under.trace
        switch(True)
        world.traces = {
            rank: VirtualTrace(
                steps, folder / file_name(rank), rank, f"rank {rank} ({name}, virtual)",
                clock=lambda: world.now_s,
                batches_per_push=self.strategy.push_every,
                about={"clock": "virtual time, the same on all ranks"},
            )
            for rank, name in names.items()
        }  # fmt: skip

    def _charge(self, rank: int, effect: Compute) -> float:
        """Seconds of a task besides those of the compute law."""
        load = self.workload
        if effect.what == "checkpoint":
            return self.checkpoints.hold_up_s(rank)
        num_bytes = load.num_parameters * load.number_bytes * self.parts.get(rank, 1.0)
        return self.under.costs.seconds(
            effect.what, num_bytes, effect.num_batches, effect.size, self.codes, self.updates_itself
        )

    def _straggling(self, index: int, role: Role) -> Role:
        if index == 0:
            draw(
                self.stragglers, self.under.injections, self.strategy, self.seed, lambda: self.world.elapsed_s
            )
        return self.stragglers[index].wrap(role) if self.stragglers else role

    def result(self, found: dict[str, Any]) -> dict[str, Any]:
        """What was asked for, and what has come of it."""
        virtual_s, rows = self.world.elapsed_s, found["per_worker"]
        for row in rows:
            for key in ("compute", "wait"):
                row[f"{key}_share"] = row.get(f"{key}_s", 0.0) / virtual_s if virtual_s else 0.0
        histogram = found.get("staleness_histogram", {})
        return {
            "strategy": str(self.strategy),
            "workers": self.number,
            "servers": 0,
            "compute": str(self.compute),
            "network": str(self.network),
            "costs": str(self.under.costs),
            "seed": self.seed,
            "timing_only": True,
            "virtual": True,
            **found,
            **self.checkpoints.summary(),
            "pushes": sum(row.get("steps", 0) for row in rows),
            "virtual_s": virtual_s,
            "samples_per_second": found["samples"] / virtual_s if virtual_s else 0.0,
            "compute_share": sum(row["compute_share"] for row in rows) / len(rows),
            "wait_share": sum(row["wait_share"] for row in rows) / len(rows),
            "staleness_quantiles": quantiles(histogram),
            "num_events": self.world.num_events,
            "injected": [row for straggler in self.stragglers for row in straggler.counts()],
        }


def quantiles(histogram: Mapping[str, int]) -> dict[str, int]:
    """The least staleness that such a share of pushes does not exceed, of a histogram; empty without one."""
    number, found = sum(histogram.values()), {}
    for share in QUANTILES if number else ():
        seen = 0
        for tau, count in histogram.items():  # in order
            seen += count
            if seen >= share * number:
                found[f"{share:g}"] = int(tau)
                break
    return found


def _nobody_asks(brought: list[Any]) -> list[Any]:
    raise AssertionError("empty workers bring nothing to a collective")


def _without_roles(run: _Timing, strategy: Strategy) -> NoReturn:
    raise UsageError(f"{strategy}: timing only has roles for servers, decentralized and localsgd")


_ROLES: dict[type[Strategy], Callable[[_Timing, Any], Any]] = {
    Strategy: _without_roles,
    ServerStrategy: _Timing.over_servers,
    Decentralized: _Timing.among_peers,
    LocalSGD: _Timing.local_sgd,
}
