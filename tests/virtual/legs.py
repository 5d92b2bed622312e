"""Runs of one server family in virtual time that are killed, told to end, put to sleep and gone on with, on a model of
one number: what they have processed is counted by the store, not by the server.

Invariants: a run is a pure function of its arguments.
"""

import functools
import json
from collections import Counter

from mpitrain.effects import Break, Send, Sleep
from mpitrain.reporting.report import NullReport
from mpitrain.roles import ClippingServer, Duties, FaultTolerantServer, Rhythm, Worker
from mpitrain.strategies import Backup, BySpeed, Elastic, Sync
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.virtual import Constant, VirtualWorld
from tests.virtual.course import COURSE as ALL_COURSE
from tests.virtual.worlds import NumberReplica, NumberStore, Shuffled, by_batch, paced

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 11, 1, 2
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


class CountingStore(NumberStore):
    """Counts every sample of every gradient added."""

    def __init__(self, strategy, num_workers):
        share = strategy.share(num_workers) if isinstance(strategy, Elastic) else None
        super().__init__(1.0 if strategy.optimizer == "worker" else 0.25, share=share)
        self.rows = Counter()
        self.norms = []

    def add(self, worker, payload, weight, share=1.0):
        lease = payload.lease
        self.rows.update((lease.epoch, lease.start + i) for i in range(lease.num_samples))
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

    def __init__(self):
        self.marks = {}

    def complete(self, num_shards):
        return [parts for parts in self.marks.values() if len(parts) == num_shards]


class CheckpointWriter:
    """Writes in no time; `asked` from virtual second `ends_s` on."""

    writers, writes_last = (), False

    def __init__(self, disk, shard, store, world, every, ends_s):
        self.disk, self.shard, self.store, self.world = disk, shard, store, world
        self.every, self.ends_s = every, ends_s

    def next_checkpoint_at(self, samples):
        return self.every * (samples // self.every + 1) if self.every else 0

    def asked(self):
        return self.world.now_s >= self.ends_s

    def try_out(self, role_state):
        pass

    def save(self, mark, role_state, parts):
        store = (self.store.value, Counter(self.store.rows))
        self.disk.marks.setdefault(mark, {})[self.shard] = (json.dumps(role_state), store)


def interposed(role, at, befalls):
    """`role`, which yields the effect `befalls` before its message number `at`."""
    answer, sent = None, 0
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Send):
            if sent == at:
                yield befalls
            sent += 1
        answer = yield effect


class Ended:
    """What a run left: its servers and stores, by shard, what each rank returned, and what is on disk."""

    def __init__(self, servers, stores, returned, disk):
        self.servers, self.stores, self.returned, self.disk = servers, stores, returned, disk

    def died(self):
        return any(one.get("broken") for one in self.returned.values())


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
):
    """`kills`, `naps`: (worker's index, number of its message); `resume`: the parts of a checkpoint; `patient`: shards
    that give up nobody, where the others give up who is silent for three seconds; by default all are. `compute`: law
    of a batch's seconds; `most_s`: how long a message takes at most."""
    roles = assign((0,) * (strategy.servers + workers), strategy.servers)
    world = VirtualWorld(compute, Shuffled(seed, most_s), seed, roles.workers)
    servers, stores, processes, disk = [], [], {}, Disk()
    for shard in roles.servers:
        dealer = BatchDealer(SAMPLES, EPOCHS, batch, batches, drop_last, workers, 2) if shard == 0 else None
        store = CountingStore(strategy, workers)
        writer = CheckpointWriter(disk, shard, store, world, every, ends_s)
        clips = isinstance(strategy, ClippedSync | ClippedBackup) and strategy.servers > 1
        others = [other for other in roles.servers if other != shard]
        make = functools.partial(ClippingServer, others=others) if clips else FaultTolerantServer
        server = make(
            strategy, store, roles.workers, NullReport(), dealer, "stop", paced(SAMPLES, batch), writer,
            delivers=True, floor_s=3.0 if patient and shard not in patient else float("inf"),
        )  # fmt: skip
        if resume is not None:
            text, (store.value, rows) = resume[shard]
            store.rows = Counter(rows)
            server.restore(json.loads(text))
        world.answer_late[shard] = server.turn_away
        servers.append(server)
        stores.append(store)
        processes[shard] = server.run()
    if resume is not None:
        servers[0].rejoin([json.loads(resume[shard][0]) for shard in roles.servers])
    for index, rank in enumerate(roles.workers):
        replica = NumberReplica(strategy, 0.25, by_batch, frozenset())
        worker = Worker(
            rank, roles, replica, NullReport(), Rhythm.of(strategy, wants_final=rank == roles.validator),
            Duties(deliver=functools.partial(dict, by=index)),
        )  # fmt: skip
        role = interposed(worker.run(), dict(kills).get(index, -1), Break("kill"))
        processes[rank] = interposed(role, dict(naps).get(index, -1), Sleep(18.0, interruptible=False))
    return Ended(servers, stores, world.run(processes), disk)


def check(name, ended, samples=EPOCHS * SAMPLES):
    """Every shard has processed every sample once, and, where nothing is discarded, added it once."""
    for server, store in zip(ended.servers, ended.stores):
        counts = server.summary()
        assert counts["failure"] == ""
        assert counts["samples_accepted"] + counts["samples_dropped"] == samples, (name, counts)
        left, right = counts["staleness_identity"]
        assert left == right
        assert server.processed.num_samples() == samples
        if not isinstance(server.strategy, Elastic):  # which exchanges parameters again
            assert set(store.rows.values()) <= {1}, (name, store.rows)
            assert len(store.rows) == counts["samples_accepted"]
        if not any(word in name for word in DISCARDING):
            assert counts["samples_dropped"] == 0 and len(store.rows) == samples
