"""Whole runs on a model of one plain number a shard, watched from outside: ten thousands of pushes a second.

The rules, roles and the virtual world are the real ones; only store and replica are small, so that an update
is one line of arithmetic that a test can repeat. A `Trace` sees what a server is sent and sends: what it counts
does not depend on what the server counts.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain.effects import Compute, Recv, Send
from mpitrain.inject import Injection, Pause, Slow, Straggler
from mpitrain.messages import Alive, Answer, Away, Done, Idle, Join, Lease, Lost, Message, Pull, Push
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Duties, FaultTolerantServer, Rhythm, Server, Worker
from mpitrain.roles.failure_detector.silence import SIGNS_S
from mpitrain.strategies import Elastic
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.schedules import Pace
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.virtual import ComputeLaw, Constant, Ideal, NetworkLaw, VirtualWorld


class Number:
    """A payload: one float, the version it is or was computed on, and the batch."""

    num_bytes = 8

    def __init__(self, value: float, version: int, lease: Lease | None = None):
        self.value, self.version, self.lease = value, version, lease
        self.released = False

    def statistics(self) -> dict[str, float]:
        return {}

    def release(self) -> None:
        assert not self.released, "a payload was released twice"
        self.released = True


class Added(NamedTuple):
    """One gradient of an update."""

    worker: int
    read: int
    weight: float
    lease: Lease | None


class NumberStore:
    """Plain gradient descent on one float; `path` is its value after every update, `updates` who made them. With a
    `share` it is the centre of elastic averaging."""

    def __init__(self, rate: float, value: float = 1.0, share: float | None = None):
        self.rate, self.value, self.share = rate, value, share
        self.path = [value]
        self.updates: list[list[Added]] = []
        self.differences: dict[int, float] = {}
        self._gathered: list[Added] = []
        self._total = self._shares = 0.0
        self._unit = 1.0

    def hear_options(self, text: str) -> None:
        pass

    def add(self, worker: int, payload: Number, weight: float, share: float = 1.0) -> None:
        self._unit = self._unit if self._gathered else share
        self._shares = (self._shares if self._gathered else 0.0) + share / self._unit
        self._total += weight * share / self._unit * payload.value
        self._gathered.append(Added(worker, payload.version, weight, payload.lease))
        payload.release()

    def follow(self, samples: int, num_workers: int) -> None:
        pass

    def apply(self) -> None:
        if self.share is None:
            self.value -= self.rate * (self._total / self._shares)
        else:
            (one,) = self._gathered
            self.differences[one.worker] = self.share * (self._total - self.value)
            self.value += self.differences[one.worker]
        self.path.append(self.value)
        self.updates.append(self._gathered)
        self._gathered, self._total = [], 0.0

    def read(self, worker: int, full: bool = False, uses: int = 1) -> Number:
        if worker in self.differences and not full:
            return Number(self.differences.pop(worker), len(self.updates))
        return Number(self.value, len(self.updates))


class Gradient(NamedTuple):
    loss: float
    samples: int
    finite: bool
    share: float
    options: str = ""
    goes_on: bool = False


class NumberReplica:
    """The slope at its own value, which moves by `rate` between reads where the strategy says so; batches with a
    `poisoned` sample are not finite."""

    def __init__(
        self,
        strategy: ServerStrategy,
        rate: float,
        slope: Callable[[float, Lease], float],
        poisoned: frozenset[int],
    ):
        self.strategy, self.rate, self.slope, self.poisoned = strategy, rate, slope, poisoned
        self.values = [0.0] * strategy.servers
        self.versions = [0] * strategy.servers
        self.covers: list[Lease] = []
        self.total = [0.0] * strategy.servers

    def load(self, shard: int, payload: Number) -> None:
        self.values[shard], self.versions[shard] = payload.value, payload.version
        payload.release()

    def subtract(self, shard: int, payload: Number) -> None:
        self.values[shard] -= payload.value
        payload.release()

    def prefetch(self, lease: Lease) -> None:
        pass

    def progress(self, samples: int, living: float = 1.0) -> None:
        pass

    def gradient(self, lease: Lease, step: int) -> Gradient:
        end = lease.start + lease.num_samples
        finite = not any(lease.start <= sample < end for sample in self.poisoned)
        if not self.strategy.moves:  # the one before was pushed, or broken off
            self.covers, self.total = [], [0.0] * len(self.total)
        self.read = tuple(self.versions) if not self.covers else self.read
        self.covers.append(lease)
        for shard, value in enumerate(self.values):
            slope = self.slope(value, lease)
            move = self.rate * slope * finite * self.strategy.moves
            self.total[shard] += move if self.strategy.optimizer == "worker" else slope
            self.values[shard] -= move
        return Gradient(0.0, lease.num_samples, finite, lease.num_samples)

    def take_push(self) -> list[Number]:
        first, last = self.covers[0], self.covers[-1]
        lease = Lease(first.epoch, first.start, last.start + last.num_samples - first.start)
        pushed = self.values if self.strategy.elastic else self.total
        payloads = [Number(value, read, lease) for value, read in zip(pushed, self.read, strict=True)]
        self.covers, self.total = [], [0.0] * len(self.total)
        return payloads

    def finish(self) -> None:
        pass

    def before_final(self) -> None:
        pass

    def validate(self, samples: int | None = None) -> dict[str, float]:
        return {}

    def statistics(self) -> dict[str, float]:
        return {}


class Pushed(NamedTuple):
    """One push as it arrived: `staleness` against the version then."""

    worker: int
    lease: Lease
    staleness: int


@dataclass
class Trace:
    """What one server was sent and sent; `look(trace)` is called whenever it waits for a message."""

    server: Server
    store: NumberStore
    world: VirtualWorld
    look: Callable[[Trace], None]
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    reading: dict[int, list[int]] = field(default_factory=dict)  # versions being computed on, by worker
    due: Counter[int] = field(default_factory=Counter)  # answers each worker waits for
    pushes: list[Pushed] = field(default_factory=list)
    clock: Counter[int] = field(default_factory=Counter)  # pushes by worker
    replies: list[tuple[int, int]] = field(default_factory=list)  # (worker, version)
    update_s: list[float] = field(default_factory=list)
    staleness: int = 0  # of everything pushed, and of what was sent out and never came back
    left_in_flight: int = 0  # over all updates, reads under way at the time

    @property
    def version(self) -> int:
        return len(self.store.updates)

    def in_flight(self) -> int:
        """Sum of the staleness, so far, of what is being computed."""
        return sum(self.version - read for reads in self.reading.values() for read in reads)

    def complete(self, num_workers: int) -> bool:
        """All have joined and nobody has left, or has nothing to do."""
        return len(self.joined) == num_workers and not self.left

    def watch(self, role: Any) -> Any:
        answer = None
        while True:
            try:
                effect = role.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(effect, Recv):
                self.look(self)
            elif isinstance(effect, Send) and isinstance(effect.message, Answer):
                self._on_answer(effect.to, effect.message)
            elif isinstance(effect, Compute):
                self.update_s.append(self.world.now_s)
                self.left_in_flight += sum(map(len, self.reading.values()))
            answer = yield effect
            if isinstance(effect, Recv) and answer is not None:
                self._on_message(*answer)

    def _on_answer(self, worker: int, message: Answer) -> None:
        if not self.due[worker]:  # nobody asked: it is to begin anew
            self._unused(worker)
        self.due[worker] = 0
        if message.payload is None:
            return
        first = worker not in dict(self.replies)
        uses = self.server.strategy.inflight if first else 1
        self.reading.setdefault(worker, []).extend([message.version] * uses)
        self.replies.append((worker, message.version))

    def _on_message(self, source: int, message: Message) -> None:
        if isinstance(message, Alive | Away):  # signs of life
            return
        self.due[source] += isinstance(message, Join | Push | Pull)
        if isinstance(message, Lost):
            self.left.add(source)
            self._unused(source)
        elif isinstance(message, Join):
            self.joined.add(source)
            self.left.discard(source)
        elif isinstance(message, Done):
            self.left.add(source)
            self._unused(source)
        elif isinstance(message, Pull | Idle):
            self._unused(source)
            self.left.update([source] if isinstance(message, Idle) else [])
        elif isinstance(message, Push) and source not in self.server.table.lost:
            staleness = self.version - self.reading[source][0]
            if message.pull:
                self.reading[source].pop(0)
                if not self.reading[source]:
                    del self.reading[source]
            else:  # it goes on with what it has, as if it had read it twice at the time
                self.left_in_flight += staleness
            self.staleness += staleness
            self.clock[source] += 1
            self.pushes.append(Pushed(source, message.payload.lease, staleness))

    def _unused(self, worker: int) -> None:
        self.staleness += sum(self.version - read for read in self.reading.pop(worker, []))


class Shuffled(NetworkLaw):
    """Every message takes a time of its own, so shards see pushes in different orders; two ranks keep theirs."""

    def __init__(self, seed: int, most_s: float = 2.0):
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "most_s", most_s)

    def arrival_s(self, links: Any, now_s: float, source: int, to: int, num_bytes: int) -> float:
        times = vars(links).setdefault("times", {})
        earliest_s, number = times.get((source, to), (0.0, 0))
        took_s = self.most_s * random.Random(f"{self.seed}/{source}/{to}/{number}").random()
        times[source, to] = max(earliest_s, now_s + took_s), number + 1
        return times[source, to][0]


@dataclass
class Play:
    """A run that has ended: what was seen of each shard, and what each rank returned."""

    traces: list[Trace]
    returned: dict[int, Any]
    workers: tuple[int, ...]
    now_s: float
    ended_s: float  # when the dealing server did

    @property
    def trace(self) -> Trace:
        return self.traces[0]

    @property
    def counts(self) -> dict[str, Any]:
        return self.returned[0]

    def leases(self) -> list[Lease]:
        """What the dealing server has processed; one that is pushed again is only answered."""
        leases = [push.lease for push in self.trace.pushes]
        first = list(dict.fromkeys(leases))
        assert len(leases) - len(first) == self.trace.server.counts.repeated
        return first


def paced(epoch_samples: int, batch_size: int) -> Pace:
    """That of a job whose rates stay as they are."""
    return Pace(ticks=Ticks(epoch_samples, Law(batch_size, 1)))


def quadratic(curvature: float) -> Callable[[float, Lease], float]:
    """Slope of curvature * w^2 / 2, whatever the batch."""
    return lambda value, lease: curvature * value


def by_batch(value: float, lease: Lease) -> float:
    """A slope that differs from batch to batch, on no dyadic grid."""
    return value + random.Random(f"{lease.epoch}/{lease.start}").gauss(0.0, 1.0)


def all_leases(num_samples: int, batch_size: int, epochs: int = 1) -> list[Lease]:
    """What is to be dealt."""
    starts = range(0, num_samples, batch_size)
    return [Lease(e, s, min(batch_size, num_samples - s)) for e in range(epochs) for s in starts]


def play(
    strategy: ServerStrategy,
    num_workers: int,
    num_batches: int | None = None,
    *,
    num_samples: int = 1 << 40,
    batch_size: int = 1,
    epochs: int = 1,
    compute: ComputeLaw = Constant(1.0, 0.3),  # noqa: B008 - frozen
    network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
    slow: dict[int, float] | None = None,
    slope: Callable[[float, Lease], float] = by_batch,
    rate: float = 0.25,
    poisoned: frozenset[int] = frozenset(),
    on_nonfinite: str = "stop",
    look: Callable[[Trace], None] = lambda trace: None,
    seed: int = 0,
    least_silence_s: float = float("inf"),
    freeze: tuple[int, int, float] | None = None,
    faults: tuple[Injection, ...] = (),
    delivers: bool = False,
    heartbeat_s: float | None = None,
    around: Callable[[int, Any], Any] = lambda rank, role: role,
) -> Play:
    """Run `strategy` to its end; `slow` holds factors by worker index, `poisoned` first samples of batches; `freeze`: a
    worker's index, the batch it freezes in, and for how many seconds; `faults` are ordered as by `--inject`;
    `delivers`: a worker tells of the final model; `heartbeat_s`: nobody is told of a death, and who is silent for so
    long is given up; `around(rank, role)`: what runs in place of a role."""
    strategy.check_workers(num_workers)
    roles = assign((0,) * (strategy.servers + num_workers), strategy.servers)
    world = VirtualWorld(compute, network, seed, roles.workers, roles.workers)
    dealer = BatchDealer(num_samples, epochs, batch_size, num_batches)
    traces, processes = [], {}
    for shard in roles.servers:
        share = strategy.share(num_workers) if isinstance(strategy, Elastic) else None
        store = NumberStore(1.0 if strategy.optimizer == "worker" else rate, share=share)
        mine = dealer if shard == roles.dealer else None
        server = FaultTolerantServer(
            strategy, store, roles.workers, NullReport(), mine, on_nonfinite, paced(num_samples, batch_size),
            delivers=delivers, floor_s=least_silence_s if heartbeat_s is None else heartbeat_s,
            by_heartbeat=heartbeat_s is not None,
        )  # fmt: skip
        traces.append(Trace(server, store, world, look))
        processes[shard] = traces[shard].watch(server.run())
    stuck = (Pause(freeze[0], freeze[1], freeze[2]),) if freeze else ()
    injected = faults + stuck + tuple(Slow(worker, factor) for worker, factor in (slow or {}).items())
    for index, rank in enumerate(roles.workers):
        replica = NumberReplica(strategy, rate, slope, poisoned)
        worker = Worker(
            rank, roles, replica, NullReport(),
            Rhythm.of(
                strategy, wants_final=rank == roles.validator, heartbeat_s=heartbeat_s or 0.0,
                signs_s=SIGNS_S if strategy.blocks_apart and least_silence_s < float("inf") else 0.0,
            ),
            Duties(deliver=functools.partial(told_by, rank, replica) if delivers else None),
        )  # fmt: skip
        processes[rank] = Straggler(injected, index, seed).wrap(worker.run())
    returned = world.run({rank: around(rank, role) for rank, role in processes.items()})
    return Play(traces, returned, roles.workers, world.now_s, world.ended_s[roles.dealer])


def told_by(rank: int, replica: NumberReplica) -> dict[str, Any]:
    """What a worker delivers."""
    return {"by": rank, "values": list(replica.values)}


class Desk:
    """A server fed by hand: `feed` gives it one message; `answers` holds the version that each worker read last."""

    def __init__(self, strategy: ServerStrategy, store: Any, workers: tuple[int, ...]):
        self.server = Server(strategy, store, workers, NullReport())
        self.answers: dict[int, int] = {}
        self._role = self.server.run()
        self._role.send(None)
        for worker in workers:
            self.feed(worker, Join(0))

    def push(self, worker: int, payload: Any, version: int | None = None) -> None:
        """A gradient computed on what `worker` read last, or on that `version`."""
        step, version = self.server.counts.accepted, self.answers[worker] if version is None else version
        self.feed(worker, Push(version, step, 1, payload))

    def feed(self, source: int, message: Message) -> None:
        effect = self._role.send((source, message))
        while not isinstance(effect, Recv):
            answer = effect.task() if isinstance(effect, Compute) else 0.0
            if isinstance(effect, Send):
                self.answers[effect.to], answer = effect.message.version, None
                effect.message.payload.release()
            effect = self._role.send(answer)
