"""How fast a job would be on so many workers under a strategy, and what holds it back: closed forms, no run.

    one device          B / (T + read)
    allreduce, sync     N B / (E[max of N times] + read + exposed communication)
    backup              k B / (E[k-th smallest of N times] + read + servers)
    async               B closed_rate(N, T + read + latencies, the server's link in and out, updates), or nodes' links
    localsgd(H)         N H B / (E[max of N sums of H times] + H read + allreduce)

A strategy without such a form is run in virtual time (`virtual_runs.py`).

Invariants: arithmetic on numbers that were given; order statistics are exact where the law of computing times is
known, else means over draws that are keyed by worker, so that strategies are compared on the same draws; equal inputs
give equal bytes. What holds a
strategy back is found by ablation: the term whose removal raises the throughput most.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from mpitrain.mpi.allreduce_plan import AUTO, Transport, pinned
from mpitrain.mpi.process_group.algorithm_choice import choose
from mpitrain.simulation.step_costs import BUCKET_BYTES, FIRST_BUCKET_BYTES
from mpitrain.strategies.base import Strategy
from mpitrain.virtual.collectives import allreduce_cost
from mpitrain.virtual.compute import ComputeLaw, WorkerTimes
from mpitrain.virtual.message_law import LinkCost, closed_rate
from mpitrain.virtual.network import Cluster, Ideal, Link, NetworkLaw
from mpitrain.virtual.order_statistics import kth_of

DRAWS, MOST_DRAWS = 300, 60_000  # steps for an order statistic, and times drawn for all of its workers
MATTERS = 0.05  # a term that costs less of the throughput than this is no reason
NONE = "nothing: computing"


@dataclass
class Times:
    """Seconds of batches of all workers, by (worker, step): drawn once, used by all strategies."""

    law: ComputeLaw | tuple[float, ...]  # or seconds that were measured, drawn again with replacement
    seed: int = 0
    _drawn: dict[int, list[float]] = field(default_factory=dict)
    _exact: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def of(self, worker: int, count: int) -> list[float]:
        """The first `count` times of a worker."""
        if len(self._drawn.get(worker, ())) < count:
            if isinstance(self.law, tuple):
                stream = random.Random(f"plan {self.seed} {worker}")
                self._drawn[worker] = stream.choices(self.law, k=count)
            else:
                times = WorkerTimes(self.law, self.seed, worker)
                self._drawn[worker] = [times.next() for _ in range(count)]
        return self._drawn[worker][:count]

    @cached_property
    def mean_s(self) -> float:
        """Of one batch."""
        if (exact := self._exact_s(1, 1)) is not None:
            return exact
        drawn = [second for worker in range(16) for second in self.of(worker, DRAWS)]
        return float(sum(drawn) / len(drawn))

    def means_s(self, num_workers: int) -> list[float]:
        """Of one batch of each worker."""
        if self._exact_s(1, 1) is not None:
            return [self.mean_s] * num_workers
        count = max(20, min(DRAWS, MOST_DRAWS // num_workers))
        return [sum(self.of(worker, count)) / count for worker in range(num_workers)]

    def order_s(self, accepted: int, num_workers: int, period: int = 1) -> float:
        """Mean time until `accepted` of the workers have computed `period` batches: exact, where that is known of the
        law and batches are not added up."""
        if period == 1 and (exact := self._exact_s(accepted, num_workers)) is not None:
            return exact
        return statistics.fmean(self._orders_s(accepted, num_workers, period))

    def interval_s(self, num_workers: int, period: int = 1) -> tuple[float, float] | None:
        """In which the mean time of the last of the workers is with 95 % confidence; None where nothing was drawn, or
        all draws are the same."""
        if num_workers == 1 or (period == 1 and self._exact_s(num_workers, num_workers) is not None):
            return None
        drawn = self._orders_s(num_workers, num_workers, period)
        mean, error = statistics.fmean(drawn), 1.96 * statistics.stdev(drawn) / math.sqrt(len(drawn))
        return (mean - error, mean + error) if error else None

    def _exact_s(self, accepted: int, num_workers: int) -> float | None:
        law, key = self.law, (accepted, num_workers)
        if isinstance(law, tuple):
            return None
        if key not in self._exact:
            self._exact[key] = kth_of(law, accepted, num_workers)
        return self._exact[key]

    def _orders_s(self, accepted: int, num_workers: int, period: int = 1) -> list[float]:
        count = max(2 * period, 20, min(DRAWS, MOST_DRAWS // num_workers)) // period * period
        rows = [self.of(worker, count) for worker in range(num_workers)]
        sums = [[sum(row[at : at + period]) for at in range(0, count, period)] for row in rows]
        return [sorted(step)[accepted - 1] for step in zip(*sums, strict=True)]


@dataclass(frozen=True)
class Conditions:
    """What throughput depends on besides the strategy.

    Attributes:
        times: of batches of `batch` samples; those of smaller ones are `fixed` of it, and the rest by the samples.
        batch: samples per worker and step.
        num_bytes: of the gradients of all parameters, and of the parameters.
        inside, between: links within a node, and between two nodes; together: between nodes that all send at once,
            where each of them gets less then.
        workers_per_node: that share the node's link.
        apply_s: a server's update with one whole gradient, divided by the servers; push_s: of a server's processor for
            each push besides, which more servers do not divide; read_s: reading of a batch that is
            not hidden behind computing; validate_s: a whole validation on one rank, which no throughput counts.
        backward: share of a batch's time in which gradients can travel.
        even: no worker is ever later than the mean.
        network: the law behind the links, for runs in virtual time.
    """

    times: Times
    batch: int
    num_bytes: int
    inside: LinkCost = LinkCost()
    between: LinkCost = LinkCost()
    together: LinkCost | None = None
    workers_per_node: int = 1
    apply_s: float = 0.0
    push_s: float = 0.0
    read_s: float = 0.0
    validate_s: float = 0.0
    fixed: float = 0.0
    backward: float = 0.0
    even: bool = False
    network: NetworkLaw = Ideal()

    def scale(self, batch: float) -> float:
        """The time of a batch of so many samples as a multiple of that of a whole one."""
        return self.fixed + (1 - self.fixed) * batch / self.batch

    def step_s(self, accepted: int, num_workers: int, batch: float, period: int = 1) -> float:
        """Computing and reading of `period` batches by the first `accepted` workers."""
        even = self.even or num_workers == 1
        one_s = period * self.times.mean_s if even else self.times.order_s(accepted, num_workers, period)
        return one_s * self.scale(batch) + period * self.read_s * batch / self.batch

    def cycle_s(self, num_workers: int, batch: float) -> float:
        """Computing and reading of a batch by workers that wait for nobody, of whom the slow ones do fewer."""
        means = [self.times.mean_s] if self.even else self.times.means_s(num_workers)
        scale, read_s = self.scale(batch), self.read_s * batch / self.batch
        return len(means) / sum(1 / (one_s * scale + read_s) for one_s in means)

    def allreduce_s(self, num_workers: int, num_bytes: int) -> float:
        """By the algorithm that a run would take."""
        nodes = [
            list(range(first, min(first + self.workers_per_node, num_workers)))
            for first in range(0, num_workers, self.workers_per_node)
        ]
        between = self.together or self.between
        link = between if len(nodes) > 1 else self.inside
        transport = Transport.modelled(link.alpha_s, link.beta_s)
        algorithm = choose(num_bytes, nodes, transport, pinned() or AUTO)
        sizes = [len(node) for node in nodes]
        return allreduce_cost(algorithm, sizes, num_bytes, self.inside, between).seconds


class Virtual(NamedTuple):
    """What a run in virtual time says of a strategy: samples per second, the mean staleness, samples of an update."""

    rate: float
    stale: float
    step_samples: float


class Speeds(Protocol):
    """Where strategies without a closed form are run."""

    def speed(
        self, setting: Setting, conditions: Conditions, num_workers: int, batch: float, /
    ) -> Virtual: ...


class Setting(NamedTuple):
    """A strategy with what its speed depends on.

    Args:
        text: as `--strategy` reads it.
        kind: "allreduce", "servers" (a step waits for workers), "async", "localsgd", or "virtual": no closed form.
        servers, spare, period: as the strategies call them.
        push, reply: bytes of a message, in multiples of the parameters'.
        lossy: whether less than the numbers travels.
        strategy, runs: of "virtual": what is run, and where.
    """

    text: str
    kind: str
    servers: int = 0
    spare: int = 0
    period: int = 1
    push: float = 1.0
    reply: float = 1.0
    lossy: bool = False
    strategy: Strategy | None = None
    runs: Speeds | None = None

    def needs(self) -> int:
        """The fewest workers it makes sense for."""
        return self.spare + 1


def throughput(
    setting: Setting, conditions: Conditions, num_workers: int, batch: float | None = None
) -> float:
    """Samples per second. `batch`: samples per worker and step, where not those of the conditions.

    Raises:
        UsageError: a strategy without a closed form refuses the job, or so many workers.
    """
    batch = conditions.batch if batch is None else batch
    if setting.kind == "virtual":
        assert setting.runs is not None
        return setting.runs.speed(setting, conditions, num_workers, batch).rate
    if num_workers == 1 and setting.kind in ("allreduce", "localsgd"):
        return batch / conditions.step_s(1, 1, batch)
    if setting.kind == "allreduce":
        step_s = conditions.step_s(num_workers, num_workers, batch)
        return num_workers * batch / (step_s + _exposed_s(conditions, num_workers, batch))
    if setting.kind == "localsgd":
        round_s = conditions.step_s(num_workers, num_workers, batch, setting.period)
        round_s += conditions.allreduce_s(num_workers, conditions.num_bytes)
        return num_workers * setting.period * batch / round_s
    if setting.kind == "servers":
        accepted = num_workers - setting.spare
        step_s = conditions.step_s(accepted, num_workers, batch) + _gather_s(setting, conditions, num_workers)
        return accepted * batch / step_s
    return _async_rate(setting, conditions, num_workers, batch) * batch


def _async_rate(setting: Setting, conditions: Conditions, num_workers: int, batch: float) -> float:
    """Batches a second of workers that wait for nobody: they compute and send, and queue for the servers' links, in
    and out, and for their updates. Of several servers each has its part of every message, at once with the others."""
    link, num_bytes, servers = conditions.between, conditions.num_bytes, setting.servers
    sizes = [one * num_bytes / servers for one in (setting.push, setting.reply)]  # of a message to one server
    stations_s = [link.role_bytes(one) * link.beta_s for one in sizes] + [_push_s(setting, conditions)]
    # what an exchange takes besides its time at the stations: latencies, and the parts for the other servers
    alone_s = sum(link.role_s(one) - link.role_bytes(one) * link.beta_s for one in sizes)
    alone_s += (servers - 1) * sum(stations_s[:2])
    rate = closed_rate(num_workers, conditions.cycle_s(num_workers, batch) + alone_s, stations_s)
    heavier_s = max(stations_s[:2])
    num_nodes = -(-num_workers // conditions.workers_per_node)
    return min(rate, num_nodes / (servers * heavier_s)) if heavier_s else rate


def _exposed_s(conditions: Conditions, num_workers: int, batch: float) -> float:
    """What of the allreduce is not hidden behind the backward pass: of DDP's buckets, each of which is reduced when its
    gradients are there and the one before it is reduced, the last at least."""
    backward_s = conditions.backward * conditions.times.mean_s * conditions.scale(batch)
    done, at_s = 0, 0.0
    for num_bytes in bucket_bytes(conditions.num_bytes):
        done += num_bytes
        ready_s = backward_s * done / conditions.num_bytes
        at_s = max(at_s, ready_s) + conditions.allreduce_s(num_workers, num_bytes)
    return at_s - backward_s


def bucket_bytes(num_bytes: int) -> list[int]:
    """DDP's buckets, in the order in which they are reduced: the first is small, so that reducing begins early."""
    first = min(num_bytes, FIRST_BUCKET_BYTES)
    whole, rest = divmod(num_bytes - first, BUCKET_BYTES)
    return [first, *[BUCKET_BYTES] * whole, *([rest] if rest else [])]


def _gather_s(setting: Setting, conditions: Conditions, num_workers: int) -> float:
    """Pushes to the servers, an update with each, and replies, over the slower of servers' and nodes' links."""
    num_nodes = -(-num_workers // conditions.workers_per_node)
    copies = max(num_workers, num_workers * setting.servers / num_nodes)
    push, reply = (one * conditions.num_bytes / setting.servers for one in (setting.push, setting.reply))
    return conditions.between.gather_s(copies, push, reply) + num_workers * _push_s(setting, conditions)


def _push_s(setting: Setting, conditions: Conditions) -> float:
    """Of a server with one push."""
    return conditions.push_s + conditions.apply_s / setting.servers


# ---- what holds it back

Removal = Callable[[Conditions], Conditions]


def _without_bandwidth(conditions: Conditions) -> Conditions:
    return _with_links(conditions, _RATES, beta_s=0.0)


def _without_latency(conditions: Conditions) -> Conditions:
    return _with_links(conditions, _LATENCIES, alpha_s=0.0, post_s=0.0)


def _with_links(conditions: Conditions, network: dict[str, float], **changes: Any) -> Conditions:
    """With other links in the formulas, and other ones in what is run."""
    inside, between = (link._replace(**changes) for link in (conditions.inside, conditions.between))
    together = conditions.together and conditions.together._replace(**changes)
    law = _without(conditions.network, network)
    return replace(conditions, inside=inside, between=between, together=together, network=law)


_RATES = {
    "gbit_per_s": 1e9, "local_gbit_per_s": 1e9, "device_gbit_per_s": 0.0, "busy_gbit_per_s": 0.0, "nodes_per_switch": 0,
    "oversubscription": 1.0,
}  # fmt: skip
_LATENCIES = {"latency_s": 0.0, "local_latency_s": 0.0}


def _without(network: NetworkLaw, changes: dict[str, float]) -> NetworkLaw:
    """The same nodes with better links."""
    if not isinstance(network, Cluster | Link):
        return network
    known: dict[str, Any] = {key: value for key, value in changes.items() if hasattr(network, key)}
    return replace(network, **known)


REMOVALS: dict[str, Removal] = {
    "link": _without_bandwidth,
    "straggler tail": lambda conditions: replace(conditions, even=True),
    "latency": _without_latency,
    "apply": lambda conditions: replace(conditions, apply_s=0.0, push_s=0.0),
    "batch reading": lambda conditions: replace(conditions, read_s=0.0),
    "batch size limit": lambda conditions: replace(conditions, fixed=0.0),
}


def gains(
    setting: Setting, conditions: Conditions, num_workers: int, batch: float | None = None
) -> dict[str, float]:
    """By term, how many times as fast it would be if that term cost nothing."""
    now = throughput(setting, conditions, num_workers, batch)
    found = {}
    for name, remove in REMOVALS.items():
        if name == "batch size limit" and (batch is None or batch >= conditions.batch):
            continue  # the batch is as long as on one device: nothing is lost by cutting it
        without = throughput(setting, remove(conditions), num_workers, batch)
        found[_link_name(setting, conditions, num_workers) if name == "link" else name] = without / now
    return found


def reason(
    setting: Setting, conditions: Conditions, num_workers: int, batch: float | None = None
) -> tuple[str, float]:
    """(the term whose removal raises the throughput most, how many times)."""
    found = gains(setting, conditions, num_workers, batch)
    name = max(found, key=lambda one: found[one])
    return (name, found[name]) if found[name] >= 1 + MATTERS else (NONE, found[name])


def _link_name(setting: Setting, conditions: Conditions, num_workers: int) -> str:
    if setting.kind == "virtual":
        return "link"
    if setting.kind not in ("async", "servers"):
        return "allreduce link"
    num_nodes = -(-num_workers // conditions.workers_per_node)
    return "server link" if setting.servers <= num_nodes else "node link"


# ---- the curve
