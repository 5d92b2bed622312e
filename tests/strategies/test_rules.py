"""Rules by themselves, for every order of pushes, departures and arrivals: no store, no world, no time.

A `Desk` keeps what a server keeps (who computes, who is blocked, who takes part), asks the strategy and asserts what
must hold after any event; `explore` walks all interleavings of a small world, not some.
"""

import json
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.roles.server.worker_state import WorkerEvent, WorkerTable
from mpitrain.strategies import Async, Backup, Bounded, Drop, Inverse, Keep, Power, SoftSync, StaleSync, Sync
from mpitrain.strategies.base import Arrival, ReadsLeft, Verdict
from mpitrain.strategies.parameter_server.staleness import ShardCounts
from mpitrain.values import registered
from tests.virtual.course import COURSE, on_servers

EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["push"] * 12 + ["leave", "join"])), max_size=100
)
SIZES = st.integers(1, 6)


def left_of(reads, blocked, active):
    """(tightest, unread) of what workers compute on, by the definition."""
    olds = [read - place for own in reads.values() for place, read in enumerate(own)]
    return min(olds, default=None), any(not reads.get(worker) for worker in active - blocked)


class Update(NamedTuple):
    staleness: tuple[int, ...]
    num_active: int
    all_wait: bool


class Desk:
    """One shard's bookkeeping around a strategy; one that `saves` reads the memory back from JSON every time."""

    def __init__(self, strategy, num_workers, saves=False):
        self.strategy, self.saves = strategy, saves
        self.active, self.blocked = set(range(num_workers)), set()
        self.memory = strategy.start(tuple(range(num_workers)))
        self.version, self.reads = 0, dict.fromkeys(range(num_workers), 0)
        self.clock = Counter()
        self.gathered, self.updates, self.verdicts = [], [], []

    def do(self, worker, what):
        """One event, if it can be: who is blocked can do nothing, and only who is away can join."""
        if worker not in self.reads if what != "join" else worker in self.active:
            return
        self.memory = json.loads(json.dumps(self.memory)) if self.saves else self.memory
        if what == "join":
            self.strategy.on_join(self.memory, worker, set(self.active))
            self.clock[worker] = min((self.clock[other] for other in self.active), default=0)
            self.active.add(worker)
            self.reads[worker] = self.version
        else:
            self._carry_out(self._leave(worker) if what == "leave" else self._push(worker))
            if what == "leave" and self.gathered:
                blocked, active = set(self.blocked), set(self.active)
                left = ReadsLeft(self.version, blocked, *left_of(self._reads(), blocked, active))
                self._carry_out(self.strategy.on_read_ended(self.memory, left))
        assert not self.active or self.active - self.blocked, "everybody is blocked"

    def _leave(self, worker):
        self.reads.pop(worker)
        self.active.discard(worker)
        return self.strategy.on_leave(self.memory, worker, set(self.blocked), set(self.active))

    def _push(self, worker):
        read = self.reads.pop(worker)
        self.blocked.add(worker)
        self.clock[worker] += 1
        blocked, active = set(self.blocked), set(self.active)
        left = left_of(self._reads(), blocked, active)
        arrival = Arrival(worker, 0, read, self.version, 0.0, blocked, active, *left)
        verdict = self.strategy.on_push(self.memory, arrival)
        self.verdicts.append((self.version - read, verdict))
        if verdict.weight > 0:
            self.gathered.append(self.version - read)
        return verdict

    def _reads(self):
        return {worker: (read,) for worker, read in self.reads.items()}

    def _carry_out(self, verdict):
        assert set(verdict.release) <= self.blocked and set(verdict.restart) <= set(self.reads)
        if verdict.flush:
            assert self.gathered, "an update of nothing"
            self.updates.append(Update(tuple(self.gathered), len(self.active), self.active <= self.blocked))
            self.version, self.gathered = self.version + 1, []
        for worker in (*verdict.release, *verdict.restart):
            self.blocked.discard(worker)
            self.reads[worker] = self.version


def drive(strategy, num_workers, events, check=lambda desk: None, saves=False):
    desk = Desk(strategy, num_workers, saves)
    for worker, what in events:
        desk.do(worker, what)
        check(desk)
    return desk


@pytest.mark.parametrize("row", COURSE)
@settings(max_examples=30)
@given(num_workers=SIZES, events=EVENTS)
def test_whoever_comes_and_goes_nobody_waits_for_ever_and_nothing_stays_behind(row, num_workers, events):
    """`Desk.do` asserts that somebody can go on; at the end all who can leave do, until nobody is left."""
    desk = drive(COURSE[row](num_workers), num_workers, events)
    while desk.active:
        desk.do(min(desk.reads), "leave")
    assert not desk.blocked and not desk.gathered


@pytest.mark.parametrize("row", COURSE)
@settings(max_examples=15)
@given(num_workers=SIZES, events=EVENTS)
def test_memory_goes_through_json_at_any_moment(row, num_workers, events):
    desks = [drive(COURSE[row](num_workers), num_workers, events, saves=saves) for saves in (False, True)]
    assert desks[0].verdicts == desks[1].verdicts and desks[0].updates == desks[1].updates


@given(num_workers=SIZES, spare=st.integers(0, 5), events=EVENTS, policy=st.sampled_from(["finish", "abort"]))
def test_lockstep_takes_exactly_its_quorum_of_the_present_version(num_workers, spare, events, policy):
    for strategy in (Sync(), Backup(spare=spare, stragglers=policy)):
        spared = spare if isinstance(strategy, Backup) else 0
        desk = drive(strategy, num_workers, events)
        for update in desk.updates:
            assert update.staleness == (0,) * max(1, update.num_active - spared)
        for staleness, verdict in desk.verdicts:
            assert verdict.late == (staleness > 0) == (verdict.weight == 0)
            assert bool(verdict.restart) <= (policy == "abort" and verdict.flush)


class Scanned(StaleSync):
    """`ssp` by its definition: whoever waits is looked at after every push, and the slowest clock of all."""

    def start(self, workers):
        return {"clock": {str(worker): 0 for worker in workers}}

    def on_push(self, memory, arrival):
        memory["clock"][str(arrival.worker)] += 1
        weight = self.damping.weight(arrival.version - arrival.read)
        return Verdict(weight, weight > 0, self._within(memory, arrival.blocked))

    def on_join(self, memory, worker, active):
        memory["clock"][str(worker)] = min(memory["clock"].values(), default=0)

    def on_leave(self, memory, worker, blocked, active):
        memory["clock"].pop(str(worker), None)
        return Verdict(0.0, False, self._within(memory, blocked))

    def _within(self, memory, blocked):
        horizon = min(memory["clock"].values(), default=0) + self.bound
        return tuple(worker for worker in sorted(blocked) if memory["clock"][str(worker)] <= horizon)


class Resumed(StaleSync):
    """`ssp` from a checkpoint that has clocks alone."""

    start = Scanned.start


@settings(max_examples=200)
@given(num_workers=SIZES, bound=st.integers(0, 3), events=EVENTS)
def test_ssp_is_what_looking_at_all_clocks_makes_it(num_workers, bound, events):
    *fast, scanned = (drive(of(bound=bound), num_workers, events) for of in (StaleSync, Resumed, Scanned))
    for one in fast:
        assert one.verdicts == scanned.verdicts and one.blocked == scanned.blocked
        assert one.memory["clock"] == scanned.memory["clock"]


class Looked:
    """How many elements somebody has looked at, in containers that share this."""

    number = 0


def watched(kind, content, looked):
    """A set or dict that counts each element that is looked at."""

    def count(name):
        def method(self, *others):
            looked.number += 1 if name == "__contains__" else len(self)
            return getattr(kind, name)(self, *others)

        return method

    names = ("__iter__", "__contains__", "__sub__", "__and__", "__or__", "__le__", "values", "items", "copy")
    known = {name: count(name) for name in names if hasattr(kind, name)}
    return type("Watched", (kind,), known)(content)


@pytest.mark.parametrize(
    "strategy",
    [StaleSync(bound=2), Bounded(staleness=2000), SoftSync(updates=10), SoftSync(updates=600, blocking=True)],
)
def test_a_push_costs_no_look_at_all_workers(strategy):
    """A thousand push three times each, one after the other: what is looked at is a few each, and each once more where
    it is released."""
    number, looked = 1000, Looked()
    table, counts = WorkerTable(range(number), range(number)), ShardCounts()
    for worker in range(number):
        table.move(worker, WorkerEvent.JOIN)
        table.move(worker, WorkerEvent.ANSWER)
        counts.read(worker, 0)
    memory = strategy.start(tuple(range(number)))
    memory = {
        key: watched(dict, one, looked) if isinstance(one, dict) else one for key, one in memory.items()
    }
    counts.reads = watched(dict, counts.reads, looked)
    counts._tightest._count = watched(dict, counts._tightest._count, looked)
    num_pushes = 0
    for worker in [*range(number)] * 3:
        if worker in table.blocked:
            continue
        num_pushes += 1
        table.move(worker, WorkerEvent.PUSH)
        blocked, active = (watched(set, one, looked) for one in (table.blocked, table.active))
        left = counts.tightest(worker), table.any_unread(counts.reads)
        verdict = strategy.on_push(
            memory,
            Arrival(worker, 0, counts.oldest_read(worker), counts.version, 0.0, blocked, active, *left),
        )
        counts.push(worker, 1, 0, verdict.weight)
        if verdict.flush:
            counts.update()
        for other in verdict.release:
            table.move(other, WorkerEvent.ANSWER)
            counts.read(other, 0)
    assert num_pushes > 2 * number - 500 and looked.number < 12 * num_pushes


@given(
    num_workers=SIZES,
    updates=st.integers(1, 6),
    blocking=st.booleans(),
    events=EVENTS,
    limit=st.integers(0, 3),
)
def test_softsync_takes_exactly_its_number_of_pushes(num_workers, updates, blocking, events, limit):
    for damping in (Keep(), Drop(limit=limit)):
        strategy = SoftSync(updates=updates, blocking=blocking, damping=damping)
        for update in drive(strategy, num_workers, events).updates:
            assert len(update.staleness) == updates or (len(update.staleness) < updates and update.all_wait)


@given(num_workers=SIZES, bound=st.integers(0, 3), events=EVENTS)
def test_ssp_never_leads_by_more_than_its_bound_and_one_and_holds_nobody_within_it(
    num_workers, bound, events
):
    def check(desk):
        clock = {worker: desk.clock[worker] for worker in desk.active}
        slowest = min(clock.values(), default=0)
        assert max(clock.values(), default=0) - slowest <= bound + 1
        assert {worker for worker in clock if clock[worker] > slowest + bound} == desk.blocked

    drive(StaleSync(bound=bound, damping=Drop(limit=2)), num_workers, events, check)


@given(events=EVENTS, exponent=st.floats(0.0, 2.0), limit=st.integers(0, 4))
def test_a_push_weighs_what_its_damping_says(events, exponent, limit):
    for damping in (Keep(), Inverse(), Power(exponent), Drop(limit=limit)):
        for strategy in (Async(damping=damping), SoftSync(damping=damping), StaleSync(damping=damping)):
            for staleness, verdict in drive(strategy, 5, events).verdicts:
                assert verdict.weight == damping.weight(staleness)
                assert isinstance(strategy, SoftSync) or verdict.flush == (verdict.weight > 0)


def test_dampings_are_what_the_papers_say():
    assert [Inverse().weight(tau) for tau in (0, 1, 2, 8)] == [1.0, 1.0, 0.5, 0.125]
    assert [Power(1.0).weight(tau) for tau in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert [Drop(limit=2).weight(tau) for tau in (0, 2, 3)] == [1.0, 1.0, 0.0]
    for cls in registered("damping"):
        weights = [cls().weight(tau) for tau in range(50)]
        assert weights[0] == 1.0 and weights == sorted(weights, reverse=True) and weights[-1] >= 0.0


class Shard(NamedTuple):
    """A shard as `explore` sees it. `lags`: versions behind, of each worker that computes; `coming`: its message."""

    memory: str
    lags: tuple[int | None, ...]
    coming: tuple[str, ...]
    active: frozenset[int]
    blocked: frozenset[int]


def take(strategy, shard, worker, horizon):
    """The shard after the message of `worker` has arrived. Lags beyond the horizon are all the same."""
    memory, lags = json.loads(shard.memory), list(shard.lags)
    coming, active, blocked = list(shard.coming), set(shard.active), set(shard.blocked)
    what, coming[worker] = coming[worker], ""
    lag, lags[worker] = lags[worker], None
    if what == "leave":
        active.discard(worker)
        verdict = strategy.on_leave(memory, worker, set(blocked), set(active))
        if not verdict.flush and not verdict.release:
            left = left_of(reads_of(lags), blocked, active)
            verdict = strategy.on_read_ended(memory, ReadsLeft(9, set(blocked), *left))
    else:
        blocked.add(worker)
        left = left_of(reads_of(lags), blocked, active)
        verdict = strategy.on_push(
            memory, Arrival(worker, 0, 9 - lag, 9, 0.0, set(blocked), set(active), *left)
        )
    if verdict.flush:
        lags = [None if lag is None else min(lag + 1, horizon) for lag in lags]
    for other in verdict.release:
        blocked.discard(other)
        lags[other] = 0
    if clocks := memory.get("clock"):
        least = min(clocks.values())
        memory["clock"] = {key: clock - least for key, clock in clocks.items()}
        memory["at"] = {str(int(clock) - least): number for clock, number in memory["at"].items()}
        memory["slowest"] -= least
    text = json.dumps(memory, sort_keys=True)
    return Shard(text, tuple(lags), tuple(coming), frozenset(active), frozenset(blocked))


def reads_of(lags):
    """Versions that are being computed on, where the present one is 9."""
    return {worker: (9 - lag,) for worker, lag in enumerate(lags) if lag is not None}


def explore(strategy, num_workers, num_shards, most=10**6, check=lambda shard: None):
    """Walk every interleaving of arrivals; returns how many states there are and those in which all wait. `check` sees
    every shard after every message."""
    workers = tuple(range(num_workers))
    fresh = Shard(
        json.dumps(strategy.start(workers)),
        (0,) * num_workers,
        ("",) * num_workers,
        frozenset(workers),
        frozenset(),
    )
    horizon = 1 + max(getattr(strategy.damping, "limit", 0), getattr(strategy, "staleness", 0))
    start = (fresh,) * num_shards
    seen, todo, stuck = {start}, [start], []
    while todo:
        shards = todo.pop()
        following = []
        for worker in workers:
            if all(shard.lags[worker] is not None and not shard.coming[worker] for shard in shards):
                for what in ("push", "leave"):
                    following.append(tuple(send(shard, worker, what) for shard in shards))
            for at, shard in enumerate(shards):
                if shard.coming[worker]:
                    new = take(strategy, shard, worker, horizon)
                    check(new)
                    following.append((*shards[:at], new, *shards[at + 1 :]))
        if not following and any(shard.active for shard in shards):
            stuck.append(shards)
        todo += [new for new in dict.fromkeys(following) if new not in seen]
        seen.update(following)
        assert len(seen) < most
    return len(seen), stuck


def send(shard, worker, what):
    coming = list(shard.coming)
    coming[worker] = what
    return shard._replace(coming=tuple(coming))


HOLDING = [
    row
    for row in COURSE
    if COURSE[row](3).damping == Keep() and on_servers(COURSE[row](3), 2, 3).servers == 2
]


@pytest.mark.parametrize("row", HOLDING)
def test_two_shards_never_wait_for_each_other_in_any_interleaving(row):
    num_states, stuck = explore(on_servers(COURSE[row](3), 2, 3), 3, 2)
    assert num_states > 500 and not stuck


def test_blocking_softsync_over_shards_is_refused_because_it_could_wait_for_ever():
    strategy = SoftSync(updates=2, blocking=True, servers=2)
    assert explore(strategy, 3, 2)[1]
    with pytest.raises(UsageError, match="needs servers=1"):
        strategy.check_workers(3)
    strategy.check_workers(2)


@pytest.mark.parametrize(
    ("strategy", "num_workers", "said"),
    [
        (SoftSync(updates=4, blocking=True), 3, "wait for ever"),
        (Backup(spare=3), 3, "leaves none to wait for"),
    ],
)
def test_rules_that_could_never_update_are_refused(strategy, num_workers, said):
    with pytest.raises(UsageError, match=said):
        strategy.check_workers(num_workers)
    strategy.check_workers(num_workers + 1)
