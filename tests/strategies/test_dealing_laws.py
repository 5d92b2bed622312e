"""Laws of the arithmetic below the dealing of batches, on runs by hand and on any runs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import CheckpointError
from mpitrain.strategies.sampling.dealer import (
    MAX_WINDOWS,
    check_position,
    cut_evenly,
    joined,
    laid_out,
    share_out,
    stretch_length,
)


def test_a_stretch_is_a_share_of_half_of_what_is_left_between_one_window_and_the_most():
    window, unit = 10, 4
    lengths = {left: stretch_length(left, 2, window, unit) for left in (0, 39, 44, 100, 101, 10**6)}
    assert lengths == {
        0: 12,
        39: 12,
        44: 12,
        100: 28,
        101: 28,
        10**6: -(-MAX_WINDOWS * window // unit) * unit,
    }
    assert stretch_length(10**6, 2, 12, 4) == MAX_WINDOWS * 12
    assert stretch_length(120, 3, 8, 5) == 20 and stretch_length(120, 1, 8, 5) == 60


def test_runs_that_touch_are_one_and_empty_ones_none():
    assert joined([(7, 9), (0, 3), (3, 5), (9, 9), (5, 5), (12, 13)]) == [(0, 5), (7, 2), (12, 1)]
    assert joined([]) == [] and joined([(4, 4)]) == []


def test_what_reaches_the_end_has_not_been_opened():
    assert laid_out([(0, 3), (5, 2), (8, 2)], 10) == ({0: (0, 3), 1: (5, 7)}, 8)
    assert laid_out([(0, 3), (5, 2)], 10) == ({0: (0, 3), 1: (5, 7)}, 10)
    assert laid_out([(0, 10)], 10) == ({}, 0) and laid_out([], 10) == ({}, 10)


def test_a_position_that_lacks_something_is_refused_by_name():
    check_position({"a": 1, "b": 2}, ("a", "b"))
    with pytest.raises(CheckpointError, match="lacks c, d:"):
        check_position({"a": 1}, ("a", "c", "d"))


@given(st.integers(0, 50), st.integers(0, 40), st.integers(1, 9))
def test_shares_lie_one_behind_the_other_the_longer_ones_first(start, count, number):
    shares = [share_out(start, count, number, worker) for worker in range(number)]
    assert shares[0][0] == start and sum(length for _, length in shares) == count
    for (begin, length), (following, shorter) in itertools.pairwise(shares):
        assert following == begin + length and 0 <= length - shorter <= 1
    assert shares[0][1] - shares[-1][1] <= 1


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(1, 6),
    st.data(),
)
def test_runs_are_cut_in_parts_of_a_batch_at_most_and_nothing_of_them_is_lost(gaps, batch_size, data):
    runs, end = [], 0
    for gap, count in gaps:
        runs.append((end + gap, count))
        end += gap + count
    left = sum(count for _, count in runs)
    number = data.draw(st.integers(1, min(left, 8)))
    cut, rest = cut_evenly(runs, number, batch_size)
    assert len(cut) == number and all(1 <= count <= batch_size for _, count in cut)
    assert cut == sorted(cut) and rest == sorted(rest) and all(count for _, count in rest)

    def samples(pieces):
        return [place for start, count in pieces for place in range(start, start + count)]

    assert sorted(samples(cut) + samples(rest)) == samples(runs)


def test_the_run_with_the_largest_parts_is_cut_once_more():
    assert cut_evenly([(0, 4), (10, 8)], 3, 100) == ([(0, 4), (10, 4), (14, 4)], [])
    assert cut_evenly([(0, 4), (10, 8), (30, 1)], 2, 3) == ([(0, 3), (10, 3)], [(3, 1), (13, 5), (30, 1)])
    assert cut_evenly([(5, 7)], 2, 3) == ([(5, 3), (8, 3)], [(11, 1)])
