"""Rounds of workers in lockstep: what a server would deal, every sample once, and everybody equally often."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.roles.deals import Deals
from mpitrain.rules import Dealer, Sync
from mpitrain.rules.dealing import share_out
from mpitrain.rules.rounds import Rounds

SIZES = {
    "num_samples": st.integers(1, 400),
    "batch_size": st.integers(1, 9),
    "num_workers": st.integers(1, 6),
    "window": st.integers(1, 60),
}


def drain(rounds, limit=10**6):
    """The rounds until the end of the epoch, or so many of them."""
    found = []
    while len(found) < limit and (leases := rounds.take()) is not None:
        found.append(leases)
        rounds.peek()  # as a trainer does, to read ahead
        rounds.settle()
    return found


def positions(found):
    return [
        at
        for leases in found
        for lease in leases
        for at in range(lease.start, lease.start + lease.num_samples)
    ]


@given(
    **SIZES,
    new_batch=st.none() | st.integers(1, 9),
    new_workers=st.none() | st.integers(1, 6),
    stop=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_once_over_any_resume_and_everybody_in_every_round(
    num_samples, batch_size, num_workers, window, new_batch, new_workers, stop
):
    before = Rounds(num_samples, batch_size, num_workers, window)
    found = drain(before, stop)
    state = json.loads(json.dumps(before.state()))
    after = Rounds(num_samples, new_batch or batch_size, new_workers or num_workers, window)
    after.restore(state)
    rest = drain(after)
    left_out = after.next_epoch()
    assert left_out < after.num_workers
    seen = positions(found + rest)
    assert len(seen) == len(set(seen)) == num_samples - left_out
    for rounds, leases in [(before, leases) for leases in found] + [(after, leases) for leases in rest]:
        assert len(leases) == rounds.num_workers
        assert all(0 < lease.num_samples <= rounds.batch_size for lease in leases)
    if (after.num_workers, after.batch_size) == (num_workers, batch_size):  # it goes on as it was
        assert found + rest == drain(Rounds(num_samples, batch_size, num_workers, window))
    again = drain(after)
    assert {lease.epoch for leases in again for lease in leases} <= {1}
    assert len(set(positions(again))) == num_samples - after.next_epoch()


@given(**SIZES, drop_last=st.booleans())
def test_within_one_window_rounds_are_contiguous_global_batches(
    num_samples, batch_size, num_workers, window, drop_last
):
    """So a batch of N workers with b samples each is that of one worker with N b."""
    full, expected = num_workers * batch_size, []
    for start in range(0, num_samples, full):
        count = min(full, num_samples - start)
        if count >= num_workers and (count == full or not drop_last):
            expected.append([share_out(start, count, num_workers, worker) for worker in range(num_workers)])
    rounds = Rounds(num_samples, batch_size, num_workers, max(window, num_samples), drop_last)
    assert [[lease[1:3] for lease in leases] for leases in drain(rounds)] == expected


@given(
    rounds_per_epoch=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 6),
    window=st.integers(1, 60),
)
def test_they_are_what_a_server_deals_in_lockstep(rounds_per_epoch, batch_size, num_workers, window):
    """Two epochs, over the calls that a server makes: leases ahead at first, then one with every answer."""
    num_samples, workers = rounds_per_epoch * batch_size * num_workers, list(range(num_workers))
    dealer = Dealer(num_samples, 2, batch_size, num_workers=num_workers, window_samples=window)
    deals = Deals(Sync(), dealer, num_workers, batch_size)
    deals.first(workers, set(workers))
    dealt = {worker: deals.take(worker, 0, set(workers)) for worker in workers}
    for _ in range(2 * rounds_per_epoch):
        for worker in workers:
            deals.settle(worker)
            dealt[worker] += deals.take(worker, 1, set(workers))
    rounds = Rounds(num_samples, batch_size, num_workers, window)
    found = drain(rounds)
    assert rounds.next_epoch() == 0
    found += drain(rounds)
    assert found == [list(leases) for leases in zip(*(dealt[worker] for worker in workers), strict=True)]


def test_each_rank_reads_windows_that_nobody_else_reads():
    """Shared contiguously, each of the 400 windows would be read by all 4 ranks; in stretches of up to 16 windows only
    those in which two stretches meet are read by two."""
    readers = {}
    for leases in drain(Rounds(40_000, 16, 4, 100)):
        for worker, lease in enumerate(leases):
            for window in range(lease.start // 100, (lease.start + lease.num_samples - 1) // 100 + 1):
                readers.setdefault(window, set()).add(worker)
    reads = sum(map(len, readers.values()))
    assert len(readers) == 400 and reads < 1.2 * 400


@pytest.mark.parametrize("num_samples", [5, 9])
def test_an_incomplete_last_round_may_be_left_out(num_samples):
    rounds = Rounds(num_samples, 3, 2, 2, drop_last=True)
    assert len(drain(rounds)) == num_samples // 6
    assert rounds.next_epoch() == num_samples % 6
