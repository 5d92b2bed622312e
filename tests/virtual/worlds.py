"""Whole runs on a model of a few plain numbers, watched from outside: thousands of updates a second.

A shard is one float w with f(w) = curvature * w^2 / 2, or whatever `slope` says; the roles and the virtual
world are the real ones. A `Trace` sees only what a server is sent and sends, so what it counts does not
depend on what the server counts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain import rules
from mpitrain.effects import Compute, Kind, Recv, Send
from mpitrain.inject import Slow, Straggler
from mpitrain.report import NullReport
from mpitrain.roles import Server, Worker
from mpitrain.rules import Dealer, Lease, assign
from mpitrain.virtual import ComputeLaw, Constant, Ideal, NetworkLaw, VirtualWorld

# The course: every registered server strategy has at least one row, made for a number of workers.
COURSE: dict[str, Callable[[int], rules.ServerStrategy]] = {
    "sync": lambda n: rules.Sync(),
    "backup": lambda n: rules.Backup(spare=min(1, n - 1)),
    "backup of all but one": lambda n: rules.Backup(spare=n - 1),
    "backup abort": lambda n: rules.Backup(spare=min(2, n - 1), stragglers="abort"),
    "async": lambda n: rules.Async(),
    "async drop": lambda n: rules.Async(damping=rules.Drop(limit=n // 2)),
    "softsync": lambda n: rules.SoftSync(updates=3),
    "softsync drop": lambda n: rules.SoftSync(updates=2, damping=rules.Drop(limit=1)),
    "softsync blocking": lambda n: rules.SoftSync(updates=max(1, n - 1), blocking=True),
    "softsync blocking drop": lambda n: rules.SoftSync(min(2, n), blocking=True, damping=rules.Drop(limit=0)),
    "ssp": lambda n: rules.StaleSync(bound=1),
    "ssp rounds": lambda n: rules.StaleSync(bound=0, damping=rules.Inverse()),
}


class Number:
    """A payload: one float, and where it comes from."""

    num_bytes = 8

    def __init__(self, value: float, version: int, lease: Lease | None = None):
        self.value, self.version, self.lease = value, version, lease
        self.released = False

    def release(self) -> None:
        assert not self.released, "a payload was released twice"
        self.released = True


class Added(NamedTuple):
    """One gradient in an update."""

    worker: int
    read: int
    weight: float
    value: float


class NumberStore:
    """One shard: plain gradient descent on one float."""

    def __init__(self, rate: float = 0.0, value: float = 1.0):
        self.rate, self.value = rate, value
        self.path = [value]
        self.updates: list[list[Added]] = []
        self._gathered: list[Added] = []

    def add(self, worker: int, payload: Number, weight: float) -> None:
        self._gathered.append(Added(worker, payload.version, weight, payload.value))
        payload.release()

    def apply(self) -> None:
        total = 0.0
        for one in self._gathered:
            total += one.weight * one.value
        self.value -= self.rate * (total / len(self._gathered))
        self.path.append(self.value)
        self.updates.append(self._gathered)
        self._gathered = []

    def read(self, worker: int) -> Number:
        return Number(self.value, len(self.updates))


class Gradient(NamedTuple):
    loss: float
    samples: int
    finite: bool
    payloads: list[Number]


class NumberReplica:
    """Computes `slope(w, lease)` on the parameters loaded last."""

    def __init__(self, num_shards: int, slope: Callable[[float, Lease], float], poisoned: frozenset[int]):
        self.slope, self.poisoned = slope, poisoned
        self.loaded = [Number(0.0, 0)] * num_shards

    def load(self, shard: int, payload: Number) -> None:
        self.loaded[shard] = payload
        payload.release()

    def prefetch(self, lease: Lease) -> None:
        pass

    def gradient(self, lease: Lease, step: int) -> Gradient:
        slopes = [Number(self.slope(at.value, lease), at.version, lease) for at in self.loaded]
        return Gradient(0.0, lease.num_samples, lease.start not in self.poisoned, slopes)

    def validate(self) -> dict[str, float]:
        return {}


@dataclass
class Trace:
    """What one server was sent and sent. `look(trace)` is called whenever the server waits for a message."""

    store: NumberStore
    look: Callable[[Trace], None]
    server: Server
    world: VirtualWorld
    reading: dict[int, int] = field(default_factory=dict)  # versions being computed on, by worker
    pushes: Counter[int] = field(default_factory=Counter)
    leases: list[Lease] = field(default_factory=list)  # of the pushes, in order of arrival
    order: list[tuple[int, int]] = field(default_factory=list)  # (worker, version read) of the pushes
    replies: list[tuple[int, int]] = field(default_factory=list)  # (worker, version sent)
    update_s: list[float] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @property
    def version(self) -> int:
        return len(self.store.updates)

    @property
    def present(self) -> set[int]:
        return self.joined - self.left

    def staleness(self) -> int:
        """Sum of tau over the applied gradients."""
        return sum(at - one.read for at, update in enumerate(self.store.updates) for one in update)

    def in_flight(self) -> int:
        """Sum of tau over the versions being computed on."""
        return sum(self.version - read for read in self.reading.values())

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
                self.reading[effect.to] = effect.message.version
                self.replies.append((effect.to, effect.message.version))
            answer = yield effect
            if isinstance(effect, Compute):
                self.update_s.append(self.world.now_s)
            elif isinstance(effect, Recv):
                self._on_message(*answer)

    def _on_message(self, source: int, message: Any) -> None:
        if message.kind == Kind.JOIN:
            self.joined.add(source)
        elif message.kind == Kind.DONE:
            self.left.add(source)
            self.reading.pop(source, None)
        else:
            self.order.append((source, self.reading.pop(source)))
            self.pushes[source] += 1
            self.leases.append(message.payload.lease)


class Shuffled(NetworkLaw):
    """Every message takes its own time, so shards see pushes in different orders; two ranks keep theirs."""

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
    now_s: float

    @property
    def trace(self) -> Trace:
        return self.traces[0]

    @property
    def path(self) -> list[float]:
        """The first shard's number after every update."""
        return self.traces[0].store.path

    @property
    def counts(self) -> dict[str, Any]:
        """What the first server says of itself."""
        return self.traces[0].server.summary()


def flat(value: float, lease: Lease) -> float:
    return 0.0


def quadratic(curvature: float) -> Callable[[float, Lease], float]:
    """Slope of curvature * w^2 / 2, whatever the batch."""
    return lambda value, lease: curvature * value


def play(
    rule: rules.ServerStrategy,
    num_workers: int,
    num_batches: int | None = None,
    *,
    epochs: int = 1,
    num_samples: int = 1 << 40,
    batch_size: int = 1,
    compute: ComputeLaw = Constant(1.0, 0.3),  # noqa: B008 - frozen
    network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
    slow: dict[int, float] | None = None,
    slope: Callable[[float, Lease], float] = flat,
    rate: float = 0.0,
    poisoned: frozenset[int] = frozenset(),
    on_nonfinite: str = "stop",
    look: Callable[[Trace], None] = lambda trace: None,
    seed: int = 0,
) -> Play:
    """Run `rule` on `num_workers` workers to its end; `slow` holds factors by worker index, `poisoned` the first
    samples of batches whose gradients are not finite."""
    roles = assign((0,) * (rule.servers + num_workers), rule.servers)
    world = VirtualWorld(compute, network, seed)
    dealer = Dealer(num_samples, epochs, batch_size, num_batches)
    traces = []
    for shard in range(rule.servers):
        store, mine = NumberStore(rate), dealer if shard == 0 else None
        server = Server(rule, store, roles.workers, NullReport(), mine, on_nonfinite, num_samples)
        traces.append(Trace(store, look, server, world))
    processes = {rank: trace.watch(trace.server.run()) for rank, trace in enumerate(traces)}
    injected = tuple(Slow(worker, factor) for worker, factor in (slow or {}).items())
    for index, rank in enumerate(roles.workers):
        replica = NumberReplica(rule.servers, slope, poisoned)
        worker = Worker(rank, roles, replica, NullReport(), wants_final=rank == roles.validator)
        processes[rank] = Straggler(injected, index, seed).wrap(worker.run())
    return Play(traces, world.run(processes), world.now_s)
