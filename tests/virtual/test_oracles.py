"""The laws of staleness: integer identities that hold for any speeds, the edge of stability, the SSP bound."""

import math
from collections import Counter

import pytest

from mpitrain.strategies import Async, Drop, Inverse, SoftSync, StaleSync
from mpitrain.virtual import Constant, Exponential, LogNormal
from tests.sampling import sampled
from tests.virtual.worlds import Shuffled, play, quadratic

SPEEDS = {
    "equal": {"compute": Constant(1.0, 0.0)},
    "nearly equal": {"compute": Constant(1.0, 0.3)},
    "exponential": {"compute": Exponential()},
    "long tail": {"compute": LogNormal(1.0, 1.5)},
    "one to n fold": {"compute": Constant(1.0, 0.1), "slow": {1: 2.0, 2: 3.0, 3: 4.0}},
    "slow network": {"compute": Exponential(), "network": Shuffled(1)},
}


def holds_identity(num_workers, left_by_update):
    """Everything that was ever read ages by one an update unless that update consumes it, exactly."""
    full = []  # updates and what they left in flight, when the last worker had joined

    def look(trace):
        assert trace.staleness + trace.in_flight() == trace.left_in_flight
        left, right = trace.server.counts.identity()
        assert left == right == trace.left_in_flight
        if trace.complete(num_workers):
            full.append((trace.version, trace.left_in_flight))
            assert full[-1][1] - full[0][1] == (full[-1][0] - full[0][0]) * left_by_update

    return look, full


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("num_workers", [4, 30])
def test_staleness_identity_is_exact_at_every_event(num_workers, speeds):
    cases = [(Async(), num_workers - 1), (Async(damping=Drop(limit=num_workers)), num_workers - 1)]
    for updates in (1, 2, 3, num_workers):
        cases.append((SoftSync(updates=updates), num_workers - 1))
        cases.append((SoftSync(updates=updates, blocking=True), num_workers - updates))
    for strategy, left_by_update in cases:
        look, full = holds_identity(num_workers, left_by_update)
        seen = play(strategy, num_workers, 300, look=look, **SPEEDS[speeds])
        taus = Counter(t - one.read for t, update in enumerate(seen.trace.store.updates) for one in update)
        assert seen.counts["staleness_histogram"] == {str(tau): taus[tau] for tau in sorted(taus)}
        assert seen.counts["accepted"] == taus.total()
        assert full[-1][0] > full[0][0] + 4, "the identity says nothing without updates"


@pytest.mark.parametrize("speeds", ["exponential", "one to n fold"])
@pytest.mark.parametrize("updates", sampled([1, 2, 4, 8], [1, 4]))
def test_mean_staleness_is_what_is_left_in_flight_per_gradient(updates, speeds):
    passing = play(SoftSync(updates=updates), 8, 1500, **SPEEDS[speeds]).counts["staleness_mean"]
    assert passing == pytest.approx(7 / updates, rel=0.01)
    waiting = play(SoftSync(updates=updates, blocking=True), 8, 1500, **SPEEDS[speeds]).counts[
        "staleness_mean"
    ]
    assert waiting == pytest.approx((8 - updates) / updates, rel=0.01)


def test_softsync_of_all_is_synchronous_only_when_blocking():
    """Zhang 2016 measured staleness 0, 1 and 2 for their 1-softsync on equal machines."""
    passing = play(SoftSync(updates=8), 8, 2000, compute=Constant(1.0, 0.1)).counts["staleness_histogram"]
    assert {"0"} < set(passing) <= {"0", "1", "2"}
    waiting = play(SoftSync(updates=8, blocking=True), 8, 2000, compute=Constant(1.0, 0.1)).counts
    assert waiting["staleness_histogram"] == {"0": 2000}


def limit(tau):
    """w <- w - x * w_(t - tau) is stable exactly for 0 < x < this."""
    return 2 * math.sin(math.pi / (2 * (2 * tau + 1)))


def round_robin(num_workers, rate, num_updates, damping=None):
    """Path of w under f = w^2 / 2 with equal workers: after the first round the staleness is N - 1 for ever."""
    strategy = Async(damping=damping) if damping else Async()
    options = {"compute": Constant(1.0, 0.0), "slope": quadratic(1.0), "rate": rate}
    return play(strategy, num_workers, num_updates, **options).trace.store.path


def growth(path):
    """Largest |w| of the last tenth over that of the second tenth."""
    tenth = len(path) // 10
    return max(map(abs, path[-tenth:])) / max(map(abs, path[tenth : 2 * tenth]))


@pytest.mark.parametrize(
    ("num_workers", "num_updates"), [(4, 1500), (8, 2500), pytest.param(30, 9000, marks=pytest.mark.extended)]
)
def test_async_is_stable_up_to_the_edge_and_not_beyond(num_workers, num_updates):
    assert limit(num_workers - 1) == pytest.approx({4: 0.4450, 8: 0.2091, 30: 0.05324}[num_workers], abs=5e-5)
    for factor in (0.98, 1.02):
        rate = factor * limit(num_workers - 1)
        path = round_robin(num_workers, rate, num_updates)
        expected = [1.0]
        for t in range(num_updates):
            expected.append(expected[t] - rate * expected[max(0, t - num_workers + 1)])
        assert path == expected
        assert growth(path) < 0.1 if factor < 1 else growth(path) > 10


@pytest.mark.parametrize("num_workers", [4, 16, 64])
def test_inverse_damping_is_stable_for_any_number_of_workers(num_workers):
    damped = round_robin(num_workers, 1.0, 60 * num_workers, Inverse())
    assert max(map(abs, damped[-num_workers:])) < 1e-3
    assert max(map(abs, round_robin(num_workers, 1.0, 20 * num_workers))) > 1e3


@pytest.mark.parametrize(
    ("num_workers", "edge"), [(4, 1.335), (8, 1.46), pytest.param(16, 1.52, marks=pytest.mark.extended)]
)
def test_inverse_damping_has_its_own_edge(num_workers, edge):
    tau = num_workers - 1
    assert tau * limit(tau) == pytest.approx(edge, abs=5e-3)
    for factor in (0.98, 1.02):
        path = round_robin(num_workers, factor * tau * limit(tau), 400 * num_workers, Inverse())
        assert growth(path) < 0.1 if factor < 1 else growth(path) > 10


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_keeps_its_bound_at_every_event(bound, speeds):
    leads = []

    def look(trace):
        clock = [trace.clock[worker] for worker in sorted(trace.joined - trace.left)]
        if trace.complete(5):
            leads.append(max(clock) - min(clock))
            assert all(trace.clock[worker] <= min(clock) + bound for worker in trace.reading)

    options = {"slow": {0: 6.0}} | SPEEDS[speeds]
    seen = play(StaleSync(bound=bound), 5, 400, look=look, **options)
    assert max(leads) == bound + 1, "never more, and the slow worker makes the others use it"
    assert seen.counts["accepted"] == 400


def test_ssp_without_a_bound_is_async_and_with_bound_0_it_goes_in_rounds():
    options = {"compute": LogNormal(1.0, 1.0), "slow": {0: 3.0}}
    free, bounded = play(Async(), 5, 300, **options), play(StaleSync(bound=300), 5, 300, **options)
    assert free.trace.store.path == bounded.trace.store.path and free.trace.replies == bounded.trace.replies
    rounds = play(StaleSync(bound=0), 5, 300, **options).trace.replies
    assert rounds[: 5 * 60] == [(worker, 5 * r) for r in range(60) for worker in range(1, 6)]


def test_ssp_goes_at_the_pace_of_the_slowest_and_async_does_not():
    options = {"compute": Constant(1.0, 0.0), "slow": {0: 6.0}}
    assert play(StaleSync(bound=3), 4, 400, **options).now_s == pytest.approx(400 / 4 * 6, rel=0.05)
    assert play(Async(), 4, 400, **options).now_s == pytest.approx(400 / (3 + 1 / 6), rel=0.05)
