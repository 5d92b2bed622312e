"""Every row has one place, whatever the number of servers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.embedding.partition import MAX_ROWS, Partition
from mpitrain.errors import UsageError

WAYS = ("hash", "range")


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 500), servers=st.integers(1, 9), way=st.sampled_from(WAYS))
def test_places_are_a_bijection(rows, servers, way):
    partition = Partition(rows, servers, way)
    ids = np.arange(rows)
    where, slots = partition.place(ids)
    assert sum(partition.size(server) for server in range(servers)) == rows
    assert len(set(zip(where.tolist(), slots.tolist(), strict=True))) == rows
    for server in range(servers):
        mine = slots[where == server]
        assert sorted(mine.tolist()) == list(range(partition.size(server)))
        assert np.array_equal(partition.ids(server, mine), ids[where == server])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS - 1, 2**31 + 11])
def test_the_largest_tables_have_places_that_can_be_turned_back(rows, way):
    partition = Partition(rows, 7, way)
    ids = np.array([0, 1, rows // 2, rows - 2, rows - 1])
    for server, slot, number in zip(*partition.place(ids), ids, strict=True):
        assert 0 <= slot < partition.size(server)
        assert partition.ids(int(server), np.array([slot])) == [number]


def test_frequent_ids_that_lie_together_are_spread_over_servers():
    """Under Zipf's law the first ids are most of the traffic: no server gets a third more than its share of it."""
    share = np.arange(1, 100_001) ** -1.1
    servers, _ = Partition(100_000, 8).place(np.arange(1000, 100_000))
    load = np.bincount(servers, weights=share[1000:], minlength=8)
    assert load.max() < 1.34 * load.mean()
    ranged, _ = Partition(100_000, 8, "range").place(np.arange(1000, 100_000))
    assert np.bincount(ranged, weights=share[1000:], minlength=8).max() > 2 * load.mean()


@pytest.mark.parametrize(("rows", "way"), [(0, "hash"), (MAX_ROWS + 1, "hash"), (5, "modulo")])
def test_what_is_no_partition_is_refused(rows, way):
    with pytest.raises(UsageError, match="a table"):
        Partition(rows, 2, way)
