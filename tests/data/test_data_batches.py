"""Shards in a plain torch script: each sample once over ranks and DataLoader workers, in equally many batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from mpitrain.data import Shards
from mpitrain.data.batches import ShardBatches
from mpitrain.data.write import write_shard
from mpitrain.errors import UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    y = np.arange(50)
    write_shard(directory / "a.h5", {"y": y}, y[:30], 4)
    write_shard(directory / "b.h5", {"y": y}, y[30:], 4)
    return Shards(f"{directory}/*.h5", window_chunks=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_gives_each_sample_once_and_another_order_next_epoch(source, num_workers):
    batches = source.batches(7, transform=lambda batch: batch["y"])
    assert isinstance(batches, IterableDataset)
    orders = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        orders.append(torch.cat(list(DataLoader(batches, batch_size=None, num_workers=num_workers))).tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50)) and orders[0] != orders[1]


@given(size=st.integers(1, 50), batch=st.integers(1, 60), drop_last=st.booleans())
def test_ranks_get_equally_many_batches_and_every_sample_once(source, size, batch, drop_last):
    runs = [ShardBatches(source, batch, 0, drop_last, None)._runs(rank, size) for rank in range(size)]
    assert len({len(mine) for mine in runs}) == 1
    covered = [position for mine in runs for a, count in mine for position in range(a, a + count)]
    assert len(set(covered)) == len(covered)
    assert drop_last or covered == list(range(50))
    assert all(
        0 < count <= batch + 1 and (count == batch or not drop_last) for mine in runs for _, count in mine
    )


def test_what_cannot_be_shared_out_is_refused(source):
    with pytest.raises(UsageError, match="51 ranks for 50 samples"):
        source.batches(4)._runs(0, 51)
    with pytest.raises(UsageError, match="batch_size must be at least 1, got 0"):
        source.batches(0)
