"""Whole runs on a model of one plain number a shard, watched from outside: ten thousands of pushes a second.

The rules, roles and the virtual world are the real ones; only store and replica are small, so that an update
is one line of arithmetic that a test can repeat. A `Trace` sees what a server is sent and sends: what it counts
does not depend on what the server counts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain.effects import Compute, Kind, Message, Recv, Send
from mpitrain.inject import Slow, Straggler
from mpitrain.report import NullReport
from mpitrain.roles import Server, Worker
from mpitrain.rules import Dealer, Lease, ServerStrategy, assign
from mpitrain.virtual import ComputeLaw, Constant, Ideal, NetworkLaw, VirtualWorld


class Number:
    """A payload: one float, the version it is or was computed on, and the batch."""

    num_bytes = 8

    def __init__(self, value: float, version: int, lease: Lease | None = None):
        self.value, self.version, self.lease = value, version, lease
        self.released = False

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
    """Plain gradient descent on one float; `path` is its value after every update, `updates` who made them."""

    def __init__(self, rate: float, value: float = 1.0):
        self.rate, self.value = rate, value
        self.path = [value]
        self.updates: list[list[Added]] = []
        self._gathered: list[Added] = []
        self._total = 0.0

    def add(self, worker: int, payload: Number, weight: float) -> None:
        self._total += weight * payload.value
        self._gathered.append(Added(worker, payload.version, weight, payload.lease))
        payload.release()

    def apply(self) -> None:
        self.value -= self.rate * (self._total / len(self._gathered))
        self.path.append(self.value)
        self.updates.append(self._gathered)
        self._gathered, self._total = [], 0.0

    def read(self, worker: int, full: bool = False) -> Number:
        return Number(self.value, len(self.updates))


class Gradient(NamedTuple):
    loss: float
    samples: int
    finite: bool
    payloads: list[Number]


class NumberReplica:
    """The slope at what was loaded last; batches that start at a `poisoned` sample are not finite."""

    def __init__(self, num_shards: int, slope: Callable[[float, Lease], float], poisoned: frozenset[int]):
        self.slope, self.poisoned = slope, poisoned
        self.loaded = [Number(0.0, 0)] * num_shards

    def load(self, shard: int, payload: Number) -> None:
        self.loaded[shard] = payload
        payload.release()

    def prefetch(self, lease: Lease) -> None:
        pass

    def gradient(self, lease: Lease, step: int) -> Gradient:
        payloads = [Number(self.slope(at.value, lease), at.version, lease) for at in self.loaded]
        return Gradient(0.0, lease.num_samples, lease.start not in self.poisoned, payloads)

    def validate(self) -> dict[str, float]:
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
    reading: dict[int, int] = field(default_factory=dict)  # versions being computed on, by worker
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
        return sum(self.version - read for read in self.reading.values())

    def complete(self, num_workers: int) -> bool:
        """All have joined and nobody has left."""
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
            elif isinstance(effect, Send) and effect.message.kind == Kind.REPLY:
                self._unused(effect.to)
                self.reading[effect.to] = effect.message.version
                self.replies.append((effect.to, effect.message.version))
            elif isinstance(effect, Compute):
                self.update_s.append(self.world.now_s)
                self.left_in_flight += len(self.reading)
            answer = yield effect
            if isinstance(effect, Recv):
                self._on_message(*answer)

    def _on_message(self, source: int, message: Message) -> None:
        if message.kind == Kind.JOIN:
            self.joined.add(source)
        elif message.kind == Kind.DONE:
            self.left.add(source)
            self._unused(source)
        else:
            staleness = self.version - self.reading.pop(source)
            self.staleness += staleness
            self.clock[source] += 1
            self.pushes.append(Pushed(source, message.payload.lease, staleness))

    def _unused(self, worker: int) -> None:
        if worker in self.reading:
            self.staleness += self.version - self.reading.pop(worker)


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

    @property
    def trace(self) -> Trace:
        return self.traces[0]

    @property
    def counts(self) -> dict[str, Any]:
        return self.returned[0]

    def leases(self) -> list[Lease]:
        return [push.lease for push in self.trace.pushes]


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
    rule: ServerStrategy,
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
) -> Play:
    """Run `rule` to its end; `slow` holds factors by worker index, `poisoned` first samples of batches."""
    rule.check_workers(num_workers)
    roles = assign((0,) * (rule.servers + num_workers), rule.servers)
    world = VirtualWorld(compute, network, seed)
    dealer = Dealer(num_samples, epochs, batch_size, num_batches)
    traces, processes = [], {}
    for shard in roles.servers:
        store, mine = NumberStore(rate), dealer if shard == roles.dealer else None
        server = Server(rule, store, roles.workers, NullReport(), mine, on_nonfinite, num_samples)
        traces.append(Trace(server, store, world, look))
        processes[shard] = traces[shard].watch(server.run())
    injected = tuple(Slow(worker, factor) for worker, factor in (slow or {}).items())
    for index, rank in enumerate(roles.workers):
        replica = NumberReplica(rule.servers, slope, poisoned)
        worker = Worker(rank, roles, replica, NullReport(), wants_final=rank == roles.validator)
        processes[rank] = Straggler(injected, index, seed).wrap(worker.run())
    return Play(traces, world.run(processes), roles.workers, world.now_s)


class Desk:
    """A server fed by hand: `feed` gives it one message; `answers` holds the version that each worker read last."""

    def __init__(self, rule: ServerStrategy, store: Any, workers: tuple[int, ...]):
        self.server = Server(rule, store, workers, NullReport())
        self.answers: dict[int, int] = {}
        self._role = self.server.run()
        self._role.send(None)
        for worker in workers:
            self.feed(worker, Message(Kind.JOIN))

    def push(self, worker: int, payload: Any) -> None:
        """A gradient computed on what `worker` read last."""
        step = self.server.ledger.accepted
        self.feed(worker, Message(Kind.PUSH, self.answers[worker], step, samples=1, payload=payload))

    def feed(self, source: int, message: Message) -> None:
        effect = self._role.send((source, message))
        while not isinstance(effect, Recv):
            answer = effect.task() if isinstance(effect, Compute) else 0.0
            if isinstance(effect, Send):
                self.answers[effect.to], answer = effect.message.version, None
                effect.message.payload.release()
            effect = self._role.send(answer)
