"""A row's first values depend on seed, table and id, and on nothing else."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain.embedding.initial import initial_rows, key_of
from mpitrain.embedding.shard import lazy_zeros

IDS = np.arange(4000)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_rows_are_drawn_alike_in_any_company(law):
    whole = initial_rows(law, 0.5, 7, IDS, 5)
    some = np.array([3999, 0, 17])
    assert np.array_equal(initial_rows(law, 0.5, 7, some, 5), whole[some])
    assert not np.array_equal(initial_rows(law, 0.5, 8, some, 5), whole[some])


def test_the_laws_have_their_moments():
    """20,000 draws: five standard errors of each moment."""
    normal, uniform = (initial_rows(law, 0.5, 7, IDS, 5) for law in ("normal", "uniform"))
    assert abs(normal.mean()) < 5 * 0.5 / 20_000**0.5
    assert abs(normal.std() - 0.5) < 5 * 0.5 / 40_000**0.5
    assert abs(uniform.mean()) < 5 * 0.5 / 60_000**0.5 and np.abs(uniform).max() <= 0.5
    assert abs((normal**4).mean() / 0.5**4 - 3) < 5 * (96 / 20_000) ** 0.5
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 5 / 4000**0.5
    assert not initial_rows("zeros", 0.5, 7, IDS, 5).any()


def test_a_table_and_a_seed_have_keys_of_their_own():
    assert len({key_of(seed, name) for seed in range(20) for name in ("users", "items")}) == 40


def test_memory_is_taken_where_something_is_written():
    before = resident_bytes()
    table = lazy_zeros((1 << 22, 64), torch.float32)  # a gigabyte
    table[::100_000] = 1.0
    assert float(table[::100_000].sum()) == 64 * 42 and float(table[1::100_000].sum()) == 0.0
    assert resident_bytes() - before < 64 << 20
