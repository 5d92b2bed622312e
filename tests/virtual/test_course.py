"""The obstacle course: every server strategy ends, whatever the data, the network and the gradients, trains on
every batch exactly once, accounts for every push, and is a function of its seed.
"""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.strategies import Backup, SoftSync, Warmup
from mpitrain.strategies.base import ServerStrategy
from mpitrain.values import registered
from mpitrain.virtual import Constant, Ideal, Link, LogNormal
from tests.sampling import sampled
from tests.virtual.course import COURSE, on_servers
from tests.virtual.worlds import Shuffled, all_leases, play

NETWORKS = {"ideal": Ideal(), "link": Link(1e-6, 0.2), "shuffled": Shuffled(5)}
SHAPES = {  # workers, samples, batch size, epochs
    "one worker": (1, 17, 4, 2),
    "fewer batches than workers": (5, 7, 4, 1),
    "one batch": (3, 2, 4, 1),
    "ragged": (3, 41, 4, 3),
    "more workers than samples": (6, 4, 1, 2),
}


def test_every_registered_server_strategy_is_on_the_course():
    there = {type(row(4)) for row in COURSE.values()}
    alone = {cls for cls in registered("strategy") if issubclass(cls, ServerStrategy) and not cls.reduces}
    assert there == alone  # where workers reduce among themselves, too: tests/virtual/test_hybrid.py


def samples_of(leases):
    """(epoch, sample) of everything in the leases, in order."""
    return sorted((lease.epoch, lease.start + i) for lease in leases for i in range(lease.num_samples))


def check_all_is_accounted_for(seen, leases):
    """Every sample was pushed once, every push has one fate in every shard, nothing is left behind."""
    assert samples_of(seen.leases()) == samples_of(leases)
    for trace in seen.traces:
        counts = trace.server.summary()
        assert trace.left == set(seen.workers) and not trace.server.table.blocked
        assert sorted(push.lease for push in trace.pushes) == sorted(seen.leases())
        applied = sum(map(len, trace.store.updates))
        assert applied == counts["accepted"] and trace.version == counts["version"]
        if "abort" not in str(trace.server.strategy):  # there, who is stopped is late without a push
            fates = applied + counts["late"] + counts["dropped"] + counts["nonfinite"]
            assert fates == len(trace.pushes)
        total = sum(lease.num_samples for lease in leases)
        assert counts["samples_accepted"] + counts["samples_dropped"] == total
        assert trace.staleness == trace.left_in_flight
        assert counts["staleness_identity"] == [trace.staleness, trace.staleness]


@pytest.mark.parametrize(
    ("shape", "row"), sampled(itertools.product(SHAPES, COURSE), list(itertools.product(SHAPES, COURSE))[::3])
)
def test_every_rule_ends_with_all_of_the_data_used_once(shape, row):
    num_workers, num_samples, batch_size, epochs = SHAPES[shape]
    leases = all_leases(num_samples, batch_size, epochs)
    sizes = {"num_samples": num_samples, "batch_size": batch_size, "epochs": epochs}
    for num_servers in (1, 2, 3):
        strategy = on_servers(COURSE[row](num_workers), num_servers, num_workers)
        for network in NETWORKS.values():
            for compute in (Constant(1.0, 0.0), LogNormal(1.0, 1.0)):
                seen = play(strategy, num_workers, compute=compute, network=network, **sizes)
                check_all_is_accounted_for(seen, leases)


def _samples(lease):
    return range(lease.start, lease.start + lease.num_samples)


def without_loss(row):
    return not any(word in row for word in ("drop", "backup, one", "backup, all", "abort"))


@pytest.mark.parametrize("row", [row for row in COURSE if without_loss(row)])
def test_rules_that_drop_nothing_lose_nothing_at_the_end(row):
    seen = play(COURSE[row](4), 4, num_samples=50, batch_size=3, epochs=2)
    assert (seen.counts["accepted"], seen.counts["samples_accepted"]) == (len(seen.trace.pushes), 100)


@pytest.mark.parametrize("row", COURSE)
@pytest.mark.parametrize("warm_workers", [1, 2, 4])
def test_warmup_is_for_exactly_its_workers_until_the_samples_are_in(warm_workers, row):
    for num_servers in (1, 2):
        warmup = Warmup(workers=warm_workers, epochs=1.5)
        strategy = dataclasses.replace(on_servers(COURSE[row](4), num_servers, 4), warmup=warmup)
        seen = play(strategy, 4, num_samples=40, batch_size=3, epochs=6, network=Shuffled(7, 0.5))
        check_all_is_accounted_for(seen, all_leases(40, 3, 6))
        first = set(seen.workers[:warm_workers])
        for trace in seen.traces:
            pushed = 0
            for number, push in enumerate(trace.pushes):
                if pushed < 1.5 * 40:
                    assert push.worker in first
                    over = number
                pushed += push.lease.num_samples
            assert {push.worker for push in trace.pushes[: over + 1]} == first
            assert {push.worker for push in trace.pushes[over + 1 :]} == set(seen.workers)
            begins = dict(reversed(trace.replies))  # of each worker, the first version it was sent
            assert all((begins[worker] > 0) == (worker not in first) for worker in seen.workers)


@pytest.mark.parametrize("row", COURSE)
def test_a_warmup_longer_than_the_data_ends(row):
    strategy = dataclasses.replace(COURSE[row](4), warmup=Warmup(workers=2, epochs=5.0))
    seen = play(strategy, 4, num_samples=20, batch_size=3)
    check_all_is_accounted_for(seen, all_leases(20, 3))
    assert {push.worker for push in seen.trace.pushes} == {1, 2}


@pytest.mark.parametrize("row", COURSE)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_gradients_that_are_not_finite_are_never_applied_and_end_or_pass(num_servers, row):
    strategy = on_servers(COURSE[row](4), num_servers, 4)
    network = NETWORKS[
        "ideal" if "abort" in row else "shuffled"
    ]  # where a restart may overtake a bad gradient
    poisoned, sizes = frozenset({6, 9, 30}), {"num_samples": 50, "batch_size": 3, "network": network}
    passed = play(strategy, 4, poisoned=poisoned, on_nonfinite="skip", **sizes)
    check_all_is_accounted_for(passed, all_leases(50, 3))
    ended = play(strategy, 4, poisoned=poisoned, **sizes)
    for trace in passed.traces + ended.traces:
        bad = [push.lease for push in trace.pushes if not poisoned.isdisjoint(_samples(push.lease))]
        assert 0 < len(bad) == trace.server.counts.nonfinite
        assert not any(one.lease in bad for update in trace.store.updates for one in update)
    assert all("not finite" in trace.server.failure for trace in ended.traces)
    assert len(ended.trace.pushes) < len(passed.trace.pushes) and passed.counts["failure"] == ""


@pytest.mark.parametrize("row", COURSE)
def test_a_run_is_a_function_of_its_seed(row):
    def trace(seed):
        strategy = on_servers(COURSE[row](5), 2, 5)
        seen = play(strategy, 5, 60, compute=LogNormal(1.0, 1.0), seed=seed).traces[-1]
        return seen.store.path, seen.pushes, seen.replies, seen.update_s

    assert trace(1) == trace(1)
    assert trace(1)[3] != trace(2)[3]


@settings(max_examples=200)
@given(st.sampled_from(sorted(COURSE)), st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**30))
def test_no_order_of_arrival_makes_shards_wait_for_each_other(row, num_workers, num_servers, seed):
    draw = random.Random(seed)
    warmup = draw.choice([Warmup(), Warmup(draw.randint(1, num_workers), draw.choice([0.3, 1.0]))])
    strategy = on_servers(COURSE[row](num_workers), num_servers, num_workers)
    num_samples, batch_size = draw.randint(1, 60), draw.randint(1, 4)
    poisoned = frozenset(draw.choices(range(0, num_samples, batch_size), k=draw.choice([0, 0, 2])))
    seen = play(
        dataclasses.replace(strategy, warmup=warmup), num_workers,
        num_samples=num_samples, batch_size=batch_size, epochs=2, seed=seed, poisoned=poisoned,
        on_nonfinite=draw.choice(["skip", "stop"]), network=Shuffled(seed, draw.choice([0.1, 1.0, 5.0])),
        compute=draw.choice([Constant(1.0, 0.0), LogNormal(1.0, 1.5)]),
    )  # fmt: skip
    if not seen.counts["failure"]:
        check_all_is_accounted_for(seen, all_leases(num_samples, batch_size, 2))


@pytest.mark.parametrize(
    ("strategy", "num_workers", "said"),
    [
        (SoftSync(updates=2, blocking=True, servers=2), 3, "needs servers=1"),
        (SoftSync(updates=4, blocking=True), 3, "wait for ever"),
        (Backup(spare=3), 3, "leaves none"),
    ],
)
def test_what_could_wait_for_ever_is_refused_with_a_way_out(strategy, num_workers, said):
    with pytest.raises(UsageError, match=said):
        play(strategy, num_workers, 10)
