"""The course of the index coders: exact, within their bounds, and as small as stated (reference section 6)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.codecs import index_coding
from mpitrain.codecs.bits import num_packed_bytes, pack, unpack
from mpitrain.errors import UsageError

CODERS = [coder.name for coder in index_coding.CODERS]
RUNS = np.concatenate([np.arange(3, 900), np.arange(5000, 5017), [9999]])
SETS = {
    "empty": ([], 1000), "empty of nothing": ([], 0), "first": ([0], 1000), "last": ([999], 1000),
    "one of one": ([0], 1), "all": (range(1000), 1000), "runs": (RUNS, 10000), "ends": ([0, 999], 1000),
    "far": ([0, 2**32 - 1], 2**32), "power of two": (range(0, 4096, 16), 4096),
}  # fmt: skip


def entropy_bits(p):
    """Bits an index of an iid set cannot do without."""
    return (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p


def iid(n, p, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(n) < p)


def check(name, indices, n):
    number, data = index_coding.encode(indices, n, name)
    assert data.dtype == np.uint8
    back = index_coding.decode(number, data, len(indices), n)
    assert back.dtype == np.int64 and np.array_equal(back, indices)
    if name != "auto":
        assert index_coding.CODERS[number].name == name
    assert len(data) == index_coding.CODERS[number].num_bytes(indices, n)
    return 8 * len(data)


@pytest.mark.parametrize("name", [*CODERS, "auto"])
@pytest.mark.parametrize("case", SETS)
def test_round_trip(name, case):
    indices, n = SETS[case]
    if name == "bitmap" and n > 2**24:
        pytest.skip("half a gigabyte of bitmap")
    check(name, np.array(list(indices), dtype=np.int64), n)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 3000)), st.integers(0, 50))
def test_any_set_comes_back_and_auto_is_the_smallest(chosen, more):
    indices = np.array(sorted(chosen), dtype=np.int64)
    n = (max(chosen) + 1 if chosen else 0) + more
    sizes = [check(name, indices, n) for name in CODERS]
    assert check("auto", indices, n) == min(sizes)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 100_000), min_size=1), st.integers(1, 10_000))
def test_bounds_for_any_set(chosen, more):
    indices = np.array(sorted(chosen), dtype=np.int64)
    m, n = len(indices), int(indices[-1]) + more
    fano, rice = check("elias_fano", indices, n), check("rice", indices, n)
    assert fano <= m * (2 + math.ceil(math.log2(n / m))) + 16
    assert rice <= fano + 16
    assert check("raw", indices, n) == 32 * m and check("bitmap", indices, n) == 8 * ((n + 7) // 8)


@pytest.mark.parametrize(
    ("p", "fano", "entropy"), [(1e-2, 8.56, 8.08), (1e-3, 11.96, 11.41), (1e-4, 15.22, 14.73)]
)
def test_bits_per_index_are_the_stated_ones(p, fano, entropy):
    n = 4_000_000
    indices = iid(n, p)
    share = len(indices) / n
    assert entropy_bits(p) == pytest.approx(entropy, abs=0.01)
    assert check("elias_fano", indices, n) / len(indices) == pytest.approx(fano, abs=0.5)
    rice = check("rice", indices, n) / len(indices)
    slack = 0.25 / math.sqrt(len(indices))  # one draw is not the mean; relative
    assert entropy_bits(share) * (1 - slack) <= rice + 1e-9 and rice <= entropy_bits(share) * (1.01 + slack)


@pytest.mark.parametrize("width", range(33))
def test_packing_is_exact_and_tight(width):
    for count in (0, 1, 7, 8, 1000):
        values = np.random.default_rng(width).integers(0, 2**width, count, dtype=np.int64)
        data = pack(values, width)
        assert len(data) == num_packed_bytes(count, width)
        assert np.array_equal(unpack(data, width, count), values)


def test_more_than_32_bits_of_index_are_refused():
    with pytest.raises(UsageError, match="32 bits"):
        index_coding.encode(np.zeros(0, np.int64), 2**32 + 1)
