"""Every shard processes every push exactly once, whatever dies, is told to end or is started again between two shards.

A store counts how often each sample was added to it, which does not depend on what its server counts. Workers are
killed before every message that they send, so also between a push to one shard and the same push to the next; a run is
told to end at every moment, and one that is killed goes on from every checkpoint that it has completed.
"""

import functools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.effects import Break, Send, Sleep
from mpitrain.reporting.report import NullReport
from mpitrain.roles import ClippingServer, Duties, FaultTolerantServer, Rhythm, Worker
from mpitrain.strategies import Backup, BySpeed, Elastic, Sync
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.virtual import Constant, VirtualWorld
from tests.sampling import sampled
from tests.virtual.course import COURSE as ALL_COURSE
from tests.virtual.course import on_servers
from tests.virtual.worlds import NumberReplica, NumberStore, Shuffled, by_batch, paced

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 11, 1, 2
DISCARDING = ("backup", "drop")


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


def killed(role, at):
    """`role`, killed before its message number `at`."""
    answer, sent = None, 0
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Send):
            if sent == at:
                yield Break("kill")
            sent += 1
        answer = yield effect


def asleep(role, at):
    """`role`, still for a while before its message number `at`."""
    answer, sent = None, 0
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Send):
            if sent == at:
                yield Sleep(18.0, interruptible=False)
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
):
    """`kills`, `naps`: (worker's index, number of its message); `resume`: the parts of a checkpoint; `patient`: shards
    that give up nobody, where the others give up who is silent for three seconds; by default all are."""
    roles = assign((0,) * (strategy.servers + workers), strategy.servers)
    world = VirtualWorld(Constant(1.0, 0.3), Shuffled(seed, 0.4), seed, roles.workers)
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
        processes[rank] = asleep(killed(worker.run(), dict(kills).get(index, -1)), dict(naps).get(index, -1))
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


SEVERAL = sorted(row for row in COURSE if on_servers(COURSE[row](WORKERS), 2, WORKERS).servers == 2)
SAMPLE = sorted(COURSE)[::3]  # what `make test` runs of them


@pytest.mark.parametrize("row", sampled(SEVERAL, SAMPLE))
def test_a_worker_killed_before_any_of_its_messages_leaves_no_push_half_judged(row):
    for servers in (2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for index in (0, 2):
            at, died = 0, True
            while died:
                ended = run(strategy, kills=((index, at),), seed=at)
                check(row, ended)
                at, died = at + 1, ended.died()
            assert at > 5 * servers


@pytest.mark.parametrize("row", sampled(sorted(COURSE), SAMPLE))
def test_a_run_told_to_end_at_any_moment_goes_on_where_no_shard_has_judged(row):
    for servers in (1, 2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for moment in range(1, 16, 2):
            ended = run(strategy, ends_s=0.7 * moment, seed=moment)
            parts = ended.disk.complete(strategy.servers)
            check(row, run(strategy, resume=parts[-1] if parts else None, seed=moment + 1))


@pytest.mark.parametrize("row", sampled(SEVERAL, SAMPLE))
def test_a_run_that_is_told_to_end_right_after_its_restart_writes_all_parts_again(row):
    """Also where the others had been cut at later pushes than the dealing server."""
    ahead = 0
    for servers in (2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for moment in range(2, 10, 3):
            complete = run(strategy, ends_s=0.9 * moment, seed=moment).disk.complete(servers)
            parts = [json.loads(complete[-1][shard][0]) for shard in range(servers)]
            counts = [part["ledger"]["samples_accepted"] for part in parts]
            ahead += max(counts) > counts[0]
            again = run(strategy, resume=complete[-1], ends_s=0.0, seed=moment)
            assert again.disk.complete(servers) and all(server.checkpoints.ended for server in again.servers)
    assert ahead or any(word in row for word in ("sync", "backup", "elastic", "bounded, rounds"))


@pytest.mark.parametrize("row", sampled(sorted(COURSE), SAMPLE))
def test_a_killed_run_goes_on_from_any_of_its_checkpoints(row):
    """With as many workers or with others, and after the death of a worker."""
    for servers in (1, 2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        ended = run(strategy, every=3, seed=servers, kills=((1, 4 + 3 * servers),) * (servers > 1))
        assert len(ended.disk.complete(strategy.servers)) >= 2
        for number, parts in enumerate(ended.disk.complete(strategy.servers)):
            workers = WORKERS if "all" in row or number % 2 else WORKERS + 1
            check(row, run(strategy, workers, resume=parts, seed=number))


@pytest.mark.parametrize(
    "row", sampled([row for row in SEVERAL if not any(word in row for word in ("pu", "elastic"))], SAMPLE)
)
def test_who_is_given_up_by_one_server_and_not_by_another_leaves_no_push_half_judged(row):
    """Servers that exchange norms all do as the dealing one does."""
    together = "clipped" in row
    strategy = on_servers(COURSE[row](WORKERS), 2, WORKERS)
    given_up = 0
    for patient in (0, 1):
        for at in range(2, 24, 3):
            for index in (0, 1):  # the first one delivers, if the dealing server has not given it up
                ended = run(strategy, naps=((index, at),), patient=(patient,), seed=at)
                check(row, ended)
                given_up += len(ended.servers[1 - patient].table.lost)
                lost = ended.servers[0 if together else 1 - patient].table.lost
                assert ended.servers[patient].table.lost == (lost if together else {})
                dealing = ended.servers[0]
                living = [i for i, rank in enumerate(dealing.workers) if rank not in dealing.table.lost]
                assert dealing.delivered == {"by": living[0]}
    assert given_up > (2 if together else 4)


def test_a_run_that_no_worker_is_left_to_finish_says_so():
    """Each of them is given up by some server, although none has given up all."""
    strategy, ends = on_servers(COURSE["sync"](WORKERS), 3, WORKERS), []
    for at in range(6, 14, 2):
        for other in range(4, 12, 3):
            ended = run(strategy, naps=((2, at), (0, other)), patient=(2,), seed=154)
            failure = ended.servers[0].summary()["failure"]
            ends.append(bool(failure))
            if failure:
                assert failure.startswith("no worker is left, and not all batches are done")
            else:
                check("sync", ended)
    assert True in ends and False in ends


@settings(max_examples=60, deadline=None)
@given(
    row=st.sampled_from(sorted(COURSE)),
    servers=st.integers(1, 3),
    limits=st.sampled_from([(1, None, False), (2, None, True), (2, 7, False), (3, None, False)]),
    starts=st.lists(
        st.tuples(
            st.integers(2, 4),
            st.floats(0.5, 8.0),
            st.none() | st.tuples(st.integers(0, 1), st.integers(0, 30)),
        ),
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
def test_stopped_killed_and_started_again_with_others_all_shards_agree(row, servers, limits, starts, seed):
    """However often, with other numbers of workers, in larger batches, up to a number of batches, and without the last
    incomplete batch."""
    batch, batches, drop_last = limits
    strategy, parts = on_servers(COURSE[row](2), servers, 2), None
    sizes = {"batch": batch, "batches": batches, "drop_last": drop_last}
    for workers, ends_s, kill in starts:
        kills = () if kill is None or strategy.servers == 1 else (kill,)
        workers = 2 if "blocking" in row else workers  # shards that wait for some of many are refused
        ended = run(strategy, workers, kills, parts, 3, ends_s, seed, **sizes)
        complete = ended.disk.complete(strategy.servers)
        parts = complete[seed % len(complete)] if complete else parts
    ended = run(strategy, 2, resume=parts, seed=seed, **sizes)
    whole = EPOCHS * SAMPLES - ended.servers[0].leases.num_left_out()
    if batches is not None:
        whole = ended.servers[0].processed.num_samples()
        assert ended.servers[0].leases.dealer.num_dealt == batches
    check(row, ended, whole)
    assert all(server.processed == ended.servers[0].processed for server in ended.servers)
