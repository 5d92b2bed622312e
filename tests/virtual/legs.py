"""Runs of one server family in virtual time that are killed, told to end, put to sleep and gone on with, on a model of
one number a shard: what they have processed is counted by the store, not by the server.

Invariants: a run is a pure function of its arguments.
"""

import functools
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.effects import Break, Send, Sleep
from mpitrain.reporting.report import NullReport
from mpitrain.roles import ClippingServer, Duties, FaultTolerantServer, Rhythm, Worker
from mpitrain.roles.server.resharding import reshard_role
from mpitrain.strategies import Backup, BySpeed, Elastic, Sync
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.validation_policy import ValidationCadence, ValidationPolicy
from mpitrain.virtual import Constant, VirtualWorld
from tests.virtual.course import COURSE as ALL_COURSE
from tests.virtual.worlds import NumberReplica, NumberStore, Shuffled, by_batch, paced

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 11, 1, 2
NUMBERS = 12  # of the model
DISCARDING = ("backup", "drop")
SPREAD = Constant(1.0, 0.3)


class ClippedSync(Sync):
    """Whose servers exchange norms, where there are several."""


class ClippedBackup(Backup):
    """The same."""


# beside the course of all: servers that wait for one another, too
COURSE = ALL_COURSE | {
    "sync, clipped": lambda n: ClippedSync(),
    "sync, by speed, clipped": lambda n: ClippedSync(batching=BySpeed()),
    "backup, one, clipped": lambda n: ClippedBackup(spare=min(1, n - 1)),
    "backup, all but one, clipped": lambda n: ClippedBackup(spare=n - 1),
}


@dataclass(frozen=True)
class Besides:
    """What else is asked of a run.

    Attributes:
        told: ranks that are told to end; none: all servers.
        writers: workers that write a part of a checkpoint: "all", "first" or "none"; last: the end is written, too.
        disk_s: a rank that writes is held up for so long at most; torn: parts that are not whole, by their number among
            all parts that were begun.
        validate: samples between two validations, 0 for epochs; units: parts of the validation set, 0 for none, and
            unit_s: what one takes.
    """

    told: tuple[int, ...] = ()
    writers: str = "none"
    last: bool = False
    disk_s: float = 0.0
    torn: tuple[int, ...] = ()
    validate: int = 0
    units: int = 0
    unit_s: float = 0.0


class Piece(NamedTuple):
    """Numbers [low, high) of a shard, and how often each sample was added to them."""

    low: int
    high: int
    rows: Counter


def cuts_of(num_shards):
    """Where the shards of a model of twelve numbers begin, and the last one ends."""
    return [NUMBERS * i // num_shards for i in range(num_shards + 1)]


class CountingStore(NumberStore):
    """Counts every sample of every gradient added."""

    def __init__(self, strategy, num_workers, size=NUMBERS):
        share = strategy.share(num_workers) if isinstance(strategy, Elastic) else None
        super().__init__(1.0 if strategy.optimizer == "worker" else 0.25, share=share)
        self.pieces = [Piece(0, size, Counter())]
        self.cut_anew = False
        self.norms = []

    def mask(self, payload, spans):
        payload.masked = spans
        return payload

    def add(self, worker, payload, weight, share=1.0):
        lease, masked = payload.lease, getattr(payload, "masked", ())
        for low, high, rows in self.pieces:
            if not any(start <= low and high <= end for start, end in masked):
                rows.update((lease.epoch, lease.start + i) for i in range(lease.num_samples))
        super().add(worker, payload, weight, share)

    def mean_squares(self):
        return (self._total / self._shares) ** 2

    def apply(self, norm=None):
        if norm is not None:
            assert norm >= abs(self._total / self._shares) * (1 - 1e-12)
            self.norms.append(norm)
        super().apply()


class Disk:
    """Checkpoints by mark: of each part, the role's state as JSON brings it back, and the store's."""

    def __init__(self, torn=()):
        self.marks, self.listed, self.torn, self._num_begun = {}, {}, torn, 0

    def write(self, mark, name, role_state, held, parts):
        text = json.dumps(role_state)
        if self._num_begun not in self.torn:
            self.marks.setdefault(mark, {})[name] = text, held
        self._num_begun += 1
        if parts:
            self.listed[mark] = parts

    def whole(self):
        """Of each checkpoint of which all listed parts are there, its parts by name."""
        found = [(self.listed.get(mark), parts) for mark, parts in self.marks.items()]
        return [parts for listed, parts in found if listed and set(parts) >= set(listed)]

    def complete(self, num_shards):
        """Of each checkpoint that is whole, its parts: of shards by number, of workers by name."""
        return [
            {
                int(name.split("-")[1]) if name.startswith("shard") else name: part
                for name, part in parts.items()
            }
            for mark, parts in self.marks.items()
            if set(parts) >= set(self.listed.get(mark, ()))
            and sum(name.startswith("s") for name in parts) == num_shards
        ]


class CheckpointWriter:
    """Writes in no time; `asked` from virtual second `ends_s` on."""

    def __init__(self, disk, name, held, world, every, ends_s, writers=(), writes_last=False):
        self.disk, self.name, self.held, self.world = disk, name, held, world
        self.every, self.ends_s, self.writers, self.writes_last = every, ends_s, writers, writes_last

    def next_checkpoint_at(self, samples):
        return self.every * (samples // self.every + 1) if self.every else 0

    def asked(self):
        return self.world.now_s >= self.ends_s

    def try_out(self, role_state):
        pass

    def save(self, mark, role_state, parts):
        self.disk.write(mark, self.name, role_state, self.held(), parts)


class Held:
    """A payload that several may hold."""

    num_bytes = 8

    def __init__(self, value):
        self.value, self.users = value, 1

    def hold(self):
        self.users += 1
        return self

    def release(self):
        self.users -= 1
        assert self.users >= 0, "a payload was released too often"


class NumberMeasures:
    """The validation set of a worker: what each unit gives names what was measured."""

    averages = False

    def __init__(self, replica, num_units):
        self.replica, self.num_units, self.num_concluded = replica, num_units, 0

    def begin(self, averages):
        self.held = tuple(self.replica.values)

    def snapshot(self):
        return Held(tuple(self.replica.values))

    def unit(self, unit, snapshot=None):
        return Held((unit, tuple(self.replica.values) if snapshot is None else snapshot.value))

    def conclude(self, results, samples):
        assert [one.value for one in results] == [(unit, self.held) for unit in range(self.num_units)]
        assert self.held == tuple(self.replica.values), "it has moved meanwhile"
        self.num_concluded += 1
        return {"loss": sum(self.held)}


class CountingReplica(NumberReplica):
    """Counts how often each sample was pushed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pushed = Counter()

    def take_push(self):
        self.pushed.update((one.epoch, one.start + i) for one in self.covers for i in range(one.num_samples))
        return super().take_push()


def interposed(role, at, befalls, kind=Send):
    """`role`, which yields the effect `befalls` before its message (or other `kind` of effect) number `at`."""
    answer, sent = None, 0
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, kind):
            if sent == at:
                yield befalls
            sent += 1
        answer = yield effect


class Ended:
    """What a run left: its servers and stores, by shard, its workers' replicas, what each rank returned, and what is on
    disk."""

    def __init__(self, servers, stores, replicas, returned, disk):
        self.servers, self.stores, self.replicas = servers, stores, replicas
        self.returned, self.disk = returned, disk

    def died(self):
        return any(one.get("broken") for one in self.returned.values())


def recut(parts, num_shards):
    """The shards of a checkpoint, cut anew for so many servers."""
    shards = [parts[shard] for shard in range(sum(isinstance(name, int) for name in parts))]
    if len(shards) == num_shards:
        return shards
    states, before, cuts = [json.loads(text) for text, _ in shards], cuts_of(len(shards)), cuts_of(num_shards)
    whole = [
        Piece(start + low, start + high, rows)
        for start, (_, (_, pieces, _)) in zip(before, shards) for low, high, rows in pieces
    ]  # fmt: skip
    found = []
    for low, high in zip(cuts, cuts[1:]):
        pieces = [
            Piece(max(low, s) - low, min(high, e) - low, rows) for s, e, rows in whole if s < high and low < e
        ]
        role = reshard_role(states, before, low, high, SAMPLES)
        found.append((json.dumps(role), (shards[0][1][0], pieces, True)))
    return found


def charged(besides, seed):
    """Seconds of what is no gradient."""
    count = Counter()

    def charge(rank, effect):
        if effect.what == "validate":
            return besides.unit_s * effect.size * max(1, besides.units)
        if effect.what == "checkpoint" and besides.disk_s:
            count[rank] += 1
            return besides.disk_s * random.Random(f"disk {seed}/{rank}/{count[rank]}").random()
        return 0.0

    return charge


def run(
    strategy,
    workers=WORKERS,
    kills=(),
    resume=None,
    every=0,
    ends_s=float("inf"),
    seed=0,
    batches=None,
    batch=BATCH,
    drop_last=False,
    naps=(),
    patient=(),
    compute=SPREAD,
    most_s=0.4,
    besides=Besides(),
):
    """`kills`, `naps`: (worker's index, number of its message); `resume`: the parts of a checkpoint; `patient`: shards
    that give up nobody, where the others give up who is silent for three seconds; by default all are. `compute`: law
    of a batch's seconds; `most_s`: how long a message takes at most."""
    roles = assign((0,) * (strategy.servers + workers), strategy.servers)
    world = VirtualWorld(compute, Shuffled(seed, most_s), seed, roles.workers)
    world.charge = charged(besides, seed)
    servers, stores, processes, disk = [], [], {}, Disk(besides.torn)
    writing = {"all": roles.workers, "first": roles.workers[:1], "none": ()}[besides.writers]
    parts = None if resume is None else recut(resume, strategy.servers)

    def writer(rank, name, held):
        told = rank in besides.told if besides.told else rank in roles.servers
        return CheckpointWriter(
            disk, name, held, world, every, ends_s if told else float("inf"), writing, besides.last
        )

    for shard in roles.servers:
        dealer = BatchDealer(SAMPLES, EPOCHS, batch, batches, drop_last, workers, 2) if shard == 0 else None
        low, high = cuts_of(strategy.servers)[shard : shard + 2]
        store = CountingStore(strategy, workers, high - low)
        clips = isinstance(strategy, ClippedSync | ClippedBackup) and strategy.servers > 1
        others = [other for other in roles.servers if other != shard]
        make = functools.partial(ClippingServer, others=others) if clips else FaultTolerantServer
        server = make(
            strategy, store, roles.workers, NullReport(), dealer, "stop", paced(SAMPLES, batch),
            writer(shard, f"shard-{shard}", functools.partial(held_by, store)),
            delivers=True, floor_s=3.0 if patient and shard not in patient else float("inf"),
        )  # fmt: skip
        if parts is not None:
            text, (store.value, pieces, store.cut_anew) = parts[shard]
            store.pieces = [Piece(low, high, Counter(rows)) for low, high, rows in pieces]
            server.restore(json.loads(text))
        world.answer_late[shard] = server.turn_away
        servers.append(server)
        stores.append(store)
        processes[shard] = server.run()
    if resume is not None:
        before = sorted(name for name in resume if isinstance(name, int))
        servers[0].rejoin([json.loads(resume[shard][0]) for shard in before])
    replicas = []
    for index, rank in enumerate(roles.workers):
        replicas.append(CountingReplica(strategy, 0.25, by_batch, frozenset()))
        policy = ValidationPolicy(samples=besides.validate, epochs=int(not besides.validate))
        duties = Duties(
            writer(rank, f"worker-{index}", tuple) if rank in writing else None,
            functools.partial(dict, by=index), ValidationCadence(policy),
            NumberMeasures(replicas[-1], besides.units) if besides.units else None,
        )  # fmt: skip
        rhythm = Rhythm.of(strategy, wants_final=rank == roles.validator)
        worker = Worker(rank, roles, replicas[-1], NullReport(), rhythm, duties)
        if resume is not None and f"worker-{index}" in resume:
            worker.restore(json.loads(resume[f"worker-{index}"][0]))
        role = interposed(worker.run(), dict(kills).get(index, -1), Break("kill"))
        processes[rank] = interposed(role, dict(naps).get(index, -1), Sleep(18.0, interruptible=False))
    return Ended(servers, stores, replicas, world.run(processes), disk)


def held_by(store):
    """What a shard's part of a checkpoint holds."""
    return store.value, [Piece(low, high, Counter(rows)) for low, high, rows in store.pieces], store.cut_anew


def check(name, ended, samples=EPOCHS * SAMPLES):
    """Every shard has processed every sample once, and, where nothing is discarded, added it once."""
    for server, store in zip(ended.servers, ended.stores):
        counts = server.summary()
        assert counts["failure"] == ""
        assert counts["samples_accepted"] + counts["samples_dropped"] == samples, (name, counts)
        left, right = counts["staleness_identity"]
        assert left == right
        assert server.processed.num_samples() == samples
        for _, _, rows in store.pieces:
            if not isinstance(server.strategy, Elastic):  # which exchanges parameters again
                assert set(rows.values()) <= {1}, (name, rows)
                # what is put together from old shards counts as the first of them did
                assert len(rows) == counts["samples_accepted"] or store.cut_anew
            if not any(word in name for word in DISCARDING):
                assert counts["samples_dropped"] == 0 and len(rows) == samples
