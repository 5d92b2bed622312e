"""The global order: laws that hold for any sizes, chunks and windows."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data.read.order import Order, chunk_sizes, keyed_bits, permutation
from mpitrain.errors import UsageError

SHARDS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=6)
WINDOWS = st.integers(1, 5)
SEEDS = st.integers(0, 2**40)


def make(shards: list[tuple[int, int]], window: int, seed: int) -> Order:
    return Order(chunk_sizes(shards), window, seed)


@given(SHARDS, WINDOWS, SEEDS, st.integers(0, 5))
def test_every_sample_comes_exactly_once_per_epoch(shards, window, seed, epoch):
    order = make(shards, window, seed)
    total = sum(samples for samples, _ in shards)
    assert sorted(order.samples(epoch, 0, total)) == list(range(total))


@given(SHARDS, WINDOWS, SEEDS, st.data())
def test_the_order_does_not_depend_on_how_it_is_dealt(shards, window, seed, data):
    """Any cuts, asked for in any sequence, from another Order made the same way, give the same samples."""
    total = sum(samples for samples, _ in shards)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=8))})
    runs = data.draw(st.permutations(list(zip(cuts, cuts[1:]))))
    dealt = np.full(total, -1)
    order = make(shards, window, seed)
    for start, end in runs:
        dealt[start:end] = order.samples(1, start, end - start)
    assert np.array_equal(dealt, make(shards, window, seed).samples(1, 0, total))


@given(SHARDS, WINDOWS, SEEDS)
def test_reading_in_order_needs_one_window_of_chunks_at_a_time(shards, window, seed):
    """Each chunk's positions lie in one stretch made of `window` chunks, so it is read once."""
    order = make(shards, window, seed)
    chunks, _ = order.epoch(0).locate(0, order.num_samples)
    appearance = list(dict.fromkeys(chunks.tolist()))
    stretches = []
    position = 0
    while position < len(chunks):  # the next window is whichever chunks its length says
        members = set(chunks[position:].tolist()) & set(window_at(order.epoch(0), position))
        length = int(order.sizes[list(members)].sum())
        assert set(chunks[position : position + length].tolist()) == members
        assert len(members) <= window
        stretches.append(members)
        position += length
    assert sum(map(len, stretches)) == len(appearance) == len(order.sizes)


def window_at(epoch, position: int) -> list[int]:
    return epoch.chunks_of(epoch.window_of(position)).tolist()


@given(SHARDS, WINDOWS, SEEDS)
def test_windows_are_announced_in_the_order_in_which_they_come(shards, window, seed):
    epoch = make(shards, window, seed).epoch(2)
    chunks, _ = epoch.locate(0, epoch.num_samples)
    windows = [epoch.window_of(position) for position in range(epoch.num_samples)]
    assert windows == sorted(windows) and set(windows) == set(range(epoch.num_windows))
    for position, number in enumerate(windows):
        assert chunks[position] in epoch.chunks_of(number)
    assert len(epoch.chunks_of(epoch.num_windows)) == 0


def test_epochs_seeds_and_windows_give_different_orders():
    def ids(window: int, seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(make([(60, 5)], window, seed).samples(epoch, 0, 60).tolist())

    orders = {ids(window, seed, epoch) for window in (2, 3) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 8
    alone = {tuple(make([(60, 60)], 2, 0).samples(epoch, 0, 60).tolist()) for epoch in range(4)}
    assert len(alone) == 4  # a single chunk is shuffled anew as well


def test_windows_are_shuffled_apart():
    _, rows = make([(60, 10)], 1, 0).epoch(0).locate(0, 60)
    assert len({tuple(window) for window in rows.reshape(6, 10).tolist()}) == 6


def test_every_sample_is_equally_likely_at_every_position():
    """With equal chunks its position is uniform: chi-square over 6 x 6 cells, 25 degrees of freedom."""
    counts = np.zeros((6, 6))
    num_seeds = 3000
    for seed in range(num_seeds):
        samples = make([(4, 2), (2, 2)], 2, seed).samples(0, 0, 6)
        counts[np.arange(6), samples] += 1
    expected = num_seeds / 6
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 52.6  # the 99.9 % point; seeds are fixed, so this does not flicker


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000, 65536, 65537, 200_001])
def test_a_permutation_is_the_order_of_random_words(size):
    """Of their high bits; the ones below, in which an index has room, are no part of it."""
    words = keyed_bits(size, 7).random_raw(size) >> np.uint64(max(1, (size - 1).bit_length()))
    assert (permutation(size, size, 7) == np.argsort(words, kind="stable")).all()


def test_permutations_never_change():
    """A job resumed years later continues the same order: these values are a promise, not a snapshot."""
    assert permutation(8, 3, 1, 4).tolist() == [4, 5, 0, 3, 7, 6, 2, 1]


def test_file_order_is_the_identity():
    order = make([(7, 3), (4, 4)], 2, 0)
    chunks, rows = order.locate_in_file_order(0, 11)
    assert (order.first_sample[chunks] + rows).tolist() == list(range(11))
    assert (rows < order.sizes[chunks]).all()


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 12), (11, 1), (3, -1)])
def test_positions_outside_the_epoch_are_refused(start, count):
    with pytest.raises(UsageError, match="outside the epoch of 11 samples"):
        make([(7, 3), (4, 4)], 2, 0).samples(0, start, count)


def test_a_window_is_permuted_once_however_many_ask_for_it_meanwhile():
    epoch, windows, threads = make([(60, 10)], 3, 0).epoch(0), [], []
    permute = epoch._permute_window

    def permuted(window):
        windows.append(window)
        if threading.current_thread() is threading.main_thread():
            threads.append(threading.Thread(target=epoch.prepare, args=(window,)))
            threads[-1].start()
        return permute(window)

    epoch._permute_window = permuted
    for start in (0, 30, 0):
        epoch.locate(start, 30)
    for each in threads:
        each.join()
    assert windows == [0, 1]


def test_an_empty_run_is_empty_everywhere():
    order = make([(7, 3)], 2, 0)
    assert [len(order.samples(0, start, 0)) for start in (0, 3, 7)] == [0, 0, 0]


def test_a_negative_seed_is_refused():
    with pytest.raises(UsageError, match="must not be negative, got -1"):
        make([(7, 3)], 2, -1)
