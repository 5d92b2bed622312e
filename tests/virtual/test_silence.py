"""A worker that falls silent in virtual time: nobody waits for it in vain, and what it held is done by others."""

import pytest

from mpitrain import rules
from mpitrain.virtual import Constant
from tests.virtual.test_course import samples_of
from tests.virtual.worlds import all_leases, play


@pytest.mark.parametrize(
    "rule",
    [
        rules.Async(), rules.Async(servers=3), rules.SoftSync(updates=2), rules.StaleSync(bound=1), rules.Sync(),
        rules.SoftSync(updates=3, blocking=True), rules.Async(servers=2, inflight=2), rules.Elastic(push_every=2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("worker", [0, 2])
def test_who_is_silent_for_too_long_is_given_up_and_its_batches_are_done_by_others(rule, worker):
    """One of four takes ten thousand times as long from its third batch on; the end comes long before its next."""
    sizes = {"num_samples": 60, "batch_size": 2, "epochs": 2}
    slow = play(
        rule, 4, compute=Constant(1.0, 0.01), freeze=(worker, 3, 10_000.0), least_silence_s=3.0, **sizes
    )
    assert slow.ended_s < 1000
    for trace in slow.traces:
        assert list(trace.server.attendance.lost.values()) == ["silent"]
    assert samples_of(slow.leases()) == samples_of(all_leases(60, 2, 2))
    assert slow.counts["samples_accepted"] + slow.counts["samples_dropped"] == 120
    left, right = slow.counts["staleness_identity"]
    assert left == right


def test_slow_is_not_silent():
    """Thirty times slower than the others from the start: its usual is known, and nobody gives it up."""
    seen = play(rules.Async(), 4, slow={1: 30.0}, least_silence_s=3.0, num_samples=200, batch_size=1)
    assert seen.trace.server.attendance.lost == {}
    assert samples_of(seen.leases()) == samples_of(all_leases(200, 1))
