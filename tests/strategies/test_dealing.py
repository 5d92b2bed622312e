"""Leases: every sample of every epoch dealt once, whoever asks when; a saved position continues exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import CheckpointError
from mpitrain.strategies.sampling.dealer import BatchDealer, share_out

SIZES = {"num_samples": st.integers(1, 60), "num_epochs": st.integers(1, 4), "batch_size": st.integers(1, 70)}


def drain(dealer, asking):
    leases = []
    while (lease := dealer.deal(next(asking))) is not None:
        leases.append(lease)
    return leases


def workers(data):
    return iter(lambda: data.draw(st.integers(0, 3)), None)


@given(**SIZES, data=st.data())
def test_each_epoch_is_covered_exactly_once_and_in_order(num_samples, num_epochs, batch_size, data):
    leases = drain(BatchDealer(num_samples, num_epochs, batch_size), workers(data))
    covered = [
        (lease.epoch, position)
        for lease in leases
        for position in range(lease.start, lease.start + lease.num_samples)
    ]
    assert covered == [(epoch, position) for epoch in range(num_epochs) for position in range(num_samples)]
    assert all(0 < lease.num_samples <= batch_size for lease in leases)


@given(**SIZES, data=st.data())
def test_drop_last_leaves_out_less_than_a_batch_an_epoch_and_counts_it(
    num_samples, num_epochs, batch_size, data
):
    dealer = BatchDealer(num_samples, num_epochs, batch_size, drop_last=True)
    leases = drain(dealer, workers(data))
    dealt = sum(lease.num_samples for lease in leases)
    assert dealt + dealer.num_left_out == num_samples * num_epochs
    if num_samples >= batch_size:
        assert all(lease.num_samples == batch_size for lease in leases)
        assert dealer.num_left_out == (num_samples % batch_size) * num_epochs


@given(**SIZES, num_batches=st.integers(1, 40))
def test_a_limit_in_batches_is_exact_and_crosses_epochs(num_samples, num_epochs, batch_size, num_batches):
    leases = drain(BatchDealer(num_samples, num_epochs, batch_size, num_batches), iter(lambda: 0, None))
    assert len(leases) == num_batches


@given(**SIZES, cut=st.integers(0, 30), settled=st.integers(0, 30))
def test_state_restores_the_position_and_deals_unsettled_leases_again(
    num_samples, num_epochs, batch_size, cut, settled
):
    dealer, done = BatchDealer(num_samples, num_epochs, batch_size), []
    for index in range(cut):
        dealer.deal(index % 3)
    for worker in range(3):
        while len(done) < settled and dealer.outstanding.get(worker):
            done.append(dealer.settle_lease(worker))
    again = BatchDealer(num_samples, num_epochs, batch_size)
    again.restore(json.loads(json.dumps(dealer.state())))
    rest = drain(again, iter(lambda: 2, None))
    covered = sorted(
        (lease.epoch, p) for lease in done + rest for p in range(lease.start, lease.start + lease.num_samples)
    )
    assert covered == [(epoch, position) for epoch in range(num_epochs) for position in range(num_samples)]


def test_settling_takes_the_oldest_lease_of_that_worker():
    dealer = BatchDealer(10, 1, 2)
    first, second = dealer.deal(7), dealer.deal(7)
    dealer.deal(8)
    assert dealer.settle_lease(7) == first and dealer.outstanding[7] == [second]


def test_closing_ends_the_dealing():
    dealer = BatchDealer(10, 1, 2)
    dealer.deal(0)
    dealer.close()
    assert dealer.deal(0) is None


@given(start=st.integers(0, 99), count=st.integers(0, 99), num_workers=st.integers(1, 9))
def test_shares_of_a_global_batch_are_contiguous_and_even(start, count, num_workers):
    shares = [share_out(start, count, num_workers, worker) for worker in range(num_workers)]
    covered = [position for first, size in shares for position in range(first, first + size)]
    assert covered == list(range(start, start + count))
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1


STRETCHED = {
    "num_samples": st.integers(1, 200),
    "batch_size": st.integers(1, 9),
    "window": st.integers(1, 30),
    "num_workers": st.integers(1, 4),
}


def stretched(num_samples, batch_size, window, num_workers, drop_last=False):
    return BatchDealer(num_samples, 2, batch_size, None, drop_last, num_workers, window)


def positions(leases):
    return [(lease.epoch, p) for lease in leases for p in range(lease.start, lease.start + lease.num_samples)]


def test_a_state_of_another_version_is_refused_with_the_way_out():
    state = BatchDealer(10, 1, 2).state()
    del state["stretches"]
    with pytest.raises(
        CheckpointError, match="position in the data lacks stretches: another version.*--run-dir"
    ):
        BatchDealer(10, 1, 2).restore(state)


@given(**STRETCHED, data=st.data())
def test_stretches_cover_each_epoch_exactly_once_and_one_after_the_other(
    num_samples, batch_size, window, num_workers, data
):
    leases = drain(stretched(num_samples, batch_size, window, num_workers), workers(data))
    assert sorted(positions(leases)) == [(epoch, p) for epoch in range(2) for p in range(num_samples)]
    assert [lease.epoch for lease in leases] == sorted(lease.epoch for lease in leases)
    assert sum(lease.num_samples < batch_size for lease in leases) <= 2  # the last batch of an epoch only


@given(**STRETCHED, data=st.data())
def test_drop_last_leaves_out_the_same_with_stretches(num_samples, batch_size, window, num_workers, data):
    dealer = stretched(num_samples, batch_size, window, num_workers, drop_last=True)
    leases = drain(dealer, workers(data))
    if num_samples >= batch_size:
        assert all(lease.num_samples == batch_size for lease in leases)
        assert dealer.num_left_out == 2 * (num_samples % batch_size)
    assert len(positions(leases)) + dealer.num_left_out == 2 * num_samples


@given(**STRETCHED, cut=st.integers(0, 60), new_workers=st.integers(1, 6))
def test_another_number_of_workers_continues_in_mid_epoch(
    num_samples, batch_size, window, num_workers, cut, new_workers
):
    dealer, done = stretched(num_samples, batch_size, window, num_workers), []
    for index in range(cut):
        if dealer.deal(index % num_workers):
            done.append(dealer.settle_lease(index % num_workers))
    again = stretched(num_samples, batch_size, window, new_workers)
    again.restore(json.loads(json.dumps(dealer.state())))
    asking = iter(range(10**6))
    rest = drain(again, iter(lambda: next(asking) % new_workers, None))
    assert sorted(positions(done + rest)) == [(epoch, p) for epoch in range(2) for p in range(num_samples)]


def test_workers_are_dealt_from_windows_that_nobody_else_reads():
    """4 equal workers and 400 windows: windows touched by two of them are few."""
    dealer = BatchDealer(40_000, 1, 16, None, False, 4, 100)
    readers = {}
    for index in range(40_000 // 16):
        lease = dealer.deal(index % 4)
        for window in range(lease.start // 100, (lease.start + lease.num_samples - 1) // 100 + 1):
            readers.setdefault(window, set()).add(index % 4)
    assert sum(map(len, readers.values())) <= 1.15 * 400  # contiguous leases would make it 4 * 400


@pytest.mark.parametrize("window", [None, 16, 50])
@pytest.mark.parametrize("rounds", [1, 7, 20])
def test_in_lockstep_a_restored_dealer_goes_on_as_if_nothing_had_happened(window, rounds):
    """Two leases ahead of three workers, cut after some rounds: who trains on what afterwards is the same."""

    def play(cut):
        dealer = BatchDealer(400, 2, 4, num_workers=3, window_samples=window)
        ahead = {worker: [dealer.deal(worker)] for worker in (1, 2, 3)}
        for worker in (1, 2, 3):
            ahead[worker].append(dealer.deal(worker))
        done = []
        for number in range(60):
            for worker in (1, 2, 3):
                done.append((worker, dealer.settle_lease(worker)))
                assert done[-1][1] == ahead[worker].pop(0)
            if number == cut:
                state = dealer.state()
                dealer = BatchDealer(400, 2, 4, num_workers=3, window_samples=window)
                dealer.restore(state, (1, 2, 3))
                ahead = {worker: [] for worker in (1, 2, 3)}
                for _ in range(2):
                    for worker in (1, 2, 3):
                        ahead[worker].append(dealer.deal(worker))
            else:
                for worker in (1, 2, 3):
                    ahead[worker].append(dealer.deal(worker))
        return done

    assert play(rounds) == play(None)
