"""Bounded staleness by itself: every interleaving of small worlds, with the bound looked at after every message."""

import pytest

from mpitrain.errors import UsageError
from mpitrain.strategies import Bounded, Drop, Inverse
from mpitrain.strategies.base import Arrival, ReadsLeft
from tests.strategies.test_rules import explore, left_of

WORLDS = [(workers, 1, bound) for workers in (1, 2, 3, 4) for bound in (0, 1, 2, 3)]
WORLDS += [(5, 1, 0), (5, 1, 1), (2, 2, 0), (2, 2, 1), (2, 2, 2), (3, 2, 0), (3, 2, 1), (2, 3, 0), (2, 3, 1)]


@pytest.mark.parametrize(("num_workers", "num_shards", "staleness"), WORLDS)
def test_no_interleaving_makes_a_read_too_old_or_anybody_wait_for_ever(num_workers, num_shards, staleness):
    oldest = set()

    def check(shard):
        oldest.add(max((lag for lag in shard.lags if lag is not None), default=0))

    strategy = Bounded(staleness=staleness, servers=num_shards)
    num_states, stuck = explore(strategy, num_workers, num_shards, check=check)
    assert not stuck and num_states > num_workers
    assert max(oldest) == (staleness if num_workers > 1 else 0), "never more, and the bound is used"


def push(reads, version, blocked=(), worker=0, strategy=None, active=(0, 1, 2)):
    strategy = strategy or Bounded(staleness=2)
    memory = strategy.start(active) | {"waiting": len(blocked)}
    read, *later = reads[worker]
    blocked, active = {worker, *blocked}, set(active)
    left = left_of(reads | {worker: later}, blocked, active)
    return strategy.on_push(memory, Arrival(worker, 0, read, version, 0.0, blocked, active, *left))


def test_a_push_waits_exactly_when_its_update_alone_would_carry_a_read_beyond_the_bound():
    assert push({0: (5,), 1: (5,), 2: (6,)}, 6).release == (0,)
    assert push({0: (6,), 1: (5,), 2: (4,)}, 6) == (1.0, False, (), False, ())
    assert push({0: (4,), 2: (5,)}, 6, blocked=(1,)) == (1.0, True, (0, 1), False, ())


def test_a_dropped_gradient_waits_for_nothing_and_frees_those_it_was_waited_for():
    strategy = Bounded(staleness=4, damping=Drop(limit=1))
    assert push({0: (1,), 1: (5,), 2: (5,)}, 5, strategy=strategy) == (0.0, False, (0,), False, ())
    assert push({0: (1,), 1: (5,)}, 5, blocked=(2,), strategy=strategy) == (0.0, True, (0, 2), False, ())
    assert push({0: (1,), 1: (3,)}, 5, strategy=Bounded(staleness=4, damping=Inverse())).weight == 0.25


@pytest.mark.parametrize(("inflight", "staleness"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_one_that_is_about_to_read_counts_with_all_that_it_may_have_in_flight(inflight, staleness):
    """Its last gradient of those sees an update for each of the others, and the one that is looked at."""
    strategy = Bounded(staleness=staleness, inflight=inflight)
    left = ReadsLeft(5, {0}, *left_of({}, {0}, {0, 1}))
    flushes = strategy.on_read_ended({"waiting": 1}, left).flush
    assert flushes == (inflight <= staleness)
    known = ReadsLeft(5, {0}, *left_of({1: (5,) * inflight}, {0}, {0, 1}))
    assert strategy.on_read_ended({"waiting": 1}, known).flush == flushes, "as if it had read just now"
    nobody = ReadsLeft(5, {0, 1}, *left_of({}, {0, 1}, {0, 1}))
    assert strategy.on_read_ended({"waiting": 1}, nobody).flush


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"staleness": -1}, "at least 0, got -1"),
        ({"staleness": 0, "inflight": 2}, "at least 1 with inflight=2"),
        ({"inflight": 2, "servers": 2}, "needs servers=1"),
        ({"push_every": 2, "pull_every": 1}, "leave pull_every out"),
        ({"pull_every": 2}, "leave pull_every out"),
    ],
)
def test_what_could_wait_for_ever_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        Bounded(**changes)
