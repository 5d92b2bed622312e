"""Bounded staleness in virtual time: tau <= s for any speeds, networks and deaths, and what either end of s is."""

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import DeadlockError
from mpitrain.inject import Kill, Stop
from mpitrain.roles.server.worker_state import WorkerTable
from mpitrain.strategies import Async, Bounded, Drop, Inverse, Sync, Warmup
from mpitrain.strategies.parameter_server.staleness import ShardCounts
from mpitrain.virtual import Constant, Exponential, Ideal, LogNormal
from tests import toy
from tests.sampling import sampled
from tests.strategies.test_rules import left_of
from tests.virtual.test_course import check_all_is_accounted_for, samples_of
from tests.virtual.worlds import Shuffled, all_leases, play

SCHEDULES = [
    {"compute": Constant(1.0, 0.0)},
    {"compute": Constant(1.0, 0.3), "network": Shuffled(4, 0.5)},
    {"compute": LogNormal(1.0, 1.5), "seed": 1},
    {"compute": Exponential(), "network": Shuffled(9), "slow": {0: 6.0}, "seed": 2},
]


@pytest.fixture(autouse=True)
def asked_by_the_definition(monkeypatch):
    """What a server says of all reads at every push and departure is what looking at all of them says."""
    tightest, any_unread = ShardCounts.tightest, WorkerTable.any_unread

    def checked_tightest(counts, ended=None):
        reads = counts.reads if ended is None else {**counts.reads, ended: counts.reads[ended][1:]}
        found = tightest(counts, ended)
        assert found == left_of(reads, set(), set())[0]
        return found

    def checked_unread(table, reads):
        found = any_unread(table, reads)
        assert found == left_of(reads, table.blocked, table.active)[1]
        return found

    monkeypatch.setattr(ShardCounts, "tightest", checked_tightest)
    monkeypatch.setattr(WorkerTable, "any_unread", checked_unread)


def watch(bound, num_workers, all_stay=True):
    """A `look` that holds every read to the bound, and whoever waits to the reason; `seen`: what there was."""
    seen = {"oldest": 0, "waited": 0}

    def look(trace):
        lost = trace.server.table.lost
        reading = {worker: reads for worker, reads in trace.reading.items() if worker not in lost}
        ages = [trace.version - read for reads in reading.values() for read in reads]
        assert max(ages, default=0) <= bound
        seen["oldest"] = max([seen["oldest"], *ages])
        if not trace.server.gathering.empty and trace.complete(num_workers):
            seen["waited"] += 1
            if not all_stay:
                return
            places = [
                trace.version + 1 - read + place
                for reads in reading.values()
                for place, read in enumerate(reads)
            ]
            unread = set(trace.server.table.active) - trace.server.table.blocked - set(reading)
            assert max(places, default=0) > bound or (unread and bound == 0), "it waits for nothing"

    return look, seen


@functools.cache
def _oldest_under_async(num_workers, schedule):
    ages = [0]

    def look(trace):
        ages.extend(trace.version - read for reads in trace.reading.values() for read in reads)

    sizes = {"num_samples": 90, "batch_size": 2, "epochs": 2}
    play(Async(), num_workers, look=look, **sizes, **SCHEDULES[schedule])
    return max(ages)


def oldest_under_async(num_workers, schedule):
    """The oldest read that plain async has on the same schedule."""
    return _oldest_under_async(num_workers, SCHEDULES.index(schedule))


@pytest.mark.parametrize("num_workers", sampled([1, 2, 3, 4, 5], [1, 3, 4]))
@pytest.mark.parametrize("bound", sampled([0, 1, 2, 3, 4, 5], [0, 1, 3]))
def test_no_read_is_ever_older_than_the_bound_and_nobody_waits_without_need(bound, num_workers):
    leases = all_leases(90, 2, 2)
    for servers in (1, 2, 3):
        for schedule in SCHEDULES:
            look, seen = watch(bound, num_workers)
            strategy = Bounded(staleness=bound, servers=servers)
            run = play(strategy, num_workers, num_samples=90, batch_size=2, epochs=2, look=look, **schedule)
            check_all_is_accounted_for(run, leases)
            assert all(push.staleness <= bound for trace in run.traces for push in trace.pushes)
            assert run.counts["accepted"] == len(leases)
            if servers == 1:  # whoever waits, waits for a read that is as old as can be
                assert seen["oldest"] == min(bound, oldest_under_async(num_workers, schedule))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_with_two_in_flight_too(bound, num_workers):
    for schedule in SCHEDULES:
        look, seen = watch(bound, num_workers)
        strategy = Bounded(staleness=bound, inflight=2)
        run = play(strategy, num_workers, num_samples=120, batch_size=2, look=look, **schedule)
        check_all_is_accounted_for(run, all_leases(120, 2))
        assert seen["oldest"] == bound or num_workers < 3


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_bound_zero_makes_every_update_of_all_gradients_in_full(num_workers, servers):
    """The sum, so it is `sync` at N times the rate: to the bit where N is a power of 2."""
    options = {"compute": LogNormal(1.0, 1.0), "num_samples": 64, "batch_size": 2}
    bounded = play(Bounded(staleness=0, servers=servers), num_workers, rate=0.03125, **options)
    lockstep = play(Sync(servers=servers), num_workers, rate=0.03125 * num_workers, **options)
    for trace, other in zip(bounded.traces, lockstep.traces, strict=True):
        assert all(len(update) == num_workers for update in trace.store.updates)
        assert trace.store.path == other.store.path


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_where_async_stays_within_the_bound_it_is_async(schedule, num_workers):
    """With equal speeds that is s >= N - 1, and one less makes somebody wait."""
    ages = [0]

    def look(trace):
        ages.extend(trace.version - read for reads in trace.reading.values() for read in reads)

    options = {"num_samples": 80, "batch_size": 2} | SCHEDULES[schedule]
    free = play(Async(), num_workers, look=look, **options).trace
    if schedule == 0:
        assert max(ages) == num_workers - 1
    bounded = play(Bounded(staleness=max(ages)), num_workers, **options).trace
    assert (bounded.store.path, bounded.replies, bounded.update_s) == (
        free.store.path,
        free.replies,
        free.update_s,
    )
    if max(ages):
        held = play(Bounded(staleness=max(ages) - 1), num_workers, **options).trace
        assert held.version < free.version


def test_what_waits_is_added_in_full_each_with_its_own_weight():
    """Two of three wait for the slow one: an update of several, whose weights are those of their staleness."""
    strategy = Bounded(staleness=2, damping=Inverse())
    trace = play(
        strategy, 3, 60, compute=Constant(1.0, 0.0), slow={2: 5.0}, slope=lambda value, lease: 1.0
    ).trace
    sizes = {len(update) for update in trace.store.updates}
    assert sizes == {1, 2, 3} or sizes == {1, 3}
    for before, update, after in zip(
        trace.store.path, trace.store.updates, trace.store.path[1:], strict=False
    ):
        version = trace.store.updates.index(update)
        wanted = sum(1 / max(1, version - one.read) for one in update)
        assert sum(one.weight for one in update) / len(update) == pytest.approx(wanted)
        assert before - after == pytest.approx(0.25 * wanted)


@pytest.mark.parametrize("fault", [Kill, Stop])
@pytest.mark.parametrize(("num_workers", "bound"), [(2, 0), (2, 1), (3, 0), (3, 1), (4, 2)])
def test_a_worker_that_dies_at_any_step_holds_nobody(num_workers, bound, fault):
    """Also while the others wait for its gradient, which never comes."""
    leases, waited = all_leases(36, 2), 0
    for servers in (1, 2):
        for worker in range(num_workers):
            for step in range(6):
                look, seen = watch(bound, num_workers, all_stay=False)
                run = play(
                    Bounded(staleness=bound, servers=servers), num_workers, num_samples=36, batch_size=2, look=look,
                    compute=Constant(1.0, 0.1), network=Shuffled(step, 0.3), slow={worker: 3.0}, seed=step,
                    faults=(fault(worker, step),), least_silence_s=5.0,
                )  # fmt: skip
                assert samples_of(run.leases()) == samples_of(leases)
                assert all(trace.server.summary()["failure"] == "" for trace in run.traces)
                waited += seen["waited"]
    assert waited


@pytest.mark.parametrize("servers", [1, 3])
def test_warmup_and_gradients_that_are_dropped_or_not_finite_leave_the_bound(servers):
    strategy = Bounded(
        staleness=2, servers=servers, damping=Drop(limit=1), push_every=2, warmup=Warmup(2, 1.5)
    )
    look, _ = watch(2, 5)
    run = play(
        strategy, 5, num_samples=40, batch_size=2, epochs=6, network=Shuffled(3, 0.5), poisoned=frozenset({4, 12}),
        on_nonfinite="skip", look=look, slow={4: 4.0},
    )  # fmt: skip
    check_all_is_accounted_for(run, all_leases(40, 2, 6))
    assert run.counts["dropped"] and run.counts["nonfinite"]


@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize("servers", [1, 2])
def test_the_sum_reaches_torch_as_one_step(tmp_path, servers, kind):
    """Bit for bit: momentum SGD at half the rate with the sum of two is `sync` with their mean."""
    changes = toy.DYADIC[kind] | {"epochs": 1, "batch_size": 8}
    models = []
    for strategy, rate in (
        (Bounded(staleness=0, servers=servers), 2.0**-5),
        (Sync(servers=servers), 2.0**-4),
    ):
        result = mt.simulate(
            toy.make_job(**changes), strategy, 2, Exponential(), Ideal(), run_dir=str(tmp_path / strategy.name),
            lr=rate, quiet=True,
        )  # fmt: skip
        models.append(load_file(result["model"]))
        assert result["steps"] == 3 and result["staleness_max"] == 0
    assert all(torch.equal(models[0][name], tensor) for name, tensor in models[1].items())


def test_it_is_one_strategy_among_the_others():
    strategy = Bounded(staleness=2, servers=2, damping=Inverse())
    assert str(strategy) == "bounded(servers=2,damping=inverse(),staleness=2)"
    assert dataclasses.replace(strategy, staleness=3) == Bounded(servers=2, damping=Inverse())
    assert mt.Bounded is Bounded


class CrossedLate(Ideal):
    """Workers 0 and 1 are heard late, and each by one of two servers later than by the other: their first messages."""

    def arrival_s(self, links, now_s, source, to, num_bytes):
        number = vars(links).setdefault("numbers", {})
        number[source, to] = number.get((source, to), 0) + 1
        late = {(2, 0): 10.0, (3, 1): 10.0}.get((source, to), 0.0)
        return now_s + late * (number[source, to] <= 2)


def test_with_two_in_flight_shards_could_lock_each_other_up_so_that_is_refused():
    class Unchecked(Bounded):
        def check(self):
            pass

    options = {"compute": Constant(1.0, 0.0), "network": CrossedLate()}
    with pytest.raises(DeadlockError, match=r"rank \d waits since t=\d+\.\d+ s for an answer from rank"):
        play(Unchecked(staleness=2, servers=2, inflight=2), 3, 60, **options)
    assert play(Bounded(staleness=2, servers=2), 3, 60, **options).counts["accepted"] == 60
