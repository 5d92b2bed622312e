"""Shards in a plain torch script: each sample once over ranks and DataLoader workers, in equally many batches."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from mpitrain.data import Shards
from mpitrain.data.read.batches import ShardBatches
from mpitrain.data.write.shard_file import write_shard
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_processes_of_a_dataloader_pin_no_memory(source):
    """What is pinned stays the same memory in processes that are forked, and CUDA cannot begin in them."""
    with source.reader(source.scan(), 0) as reader:
        torch.zeros(1, device="cuda")
        assert reader.batch(0, 0, 7)["y"].is_pinned()
    test_a_dataloader_gives_each_sample_once_and_another_order_next_epoch(source, 2)


@given(size=st.integers(1, 50), batch=st.integers(1, 60), drop_last=st.booleans())
def test_ranks_get_equally_many_batches_and_every_sample_once(source, size, batch, drop_last):
    batches = ShardBatches(source, batch, drop_last=drop_last)
    runs = [[run for (run,) in batches._left(rank, size)] for rank in range(size)]
    assert len({len(mine) for mine in runs}) == 1
    covered = [position for mine in runs for a, count in mine for position in range(a, a + count)]
    if drop_last:  # whole batches from the beginning of each rank's part
        counts = {count for mine in runs for _, count in mine}
        starts, whole = [50 * rank // size for rank in range(size)], 50 // size // batch * batch
        assert covered == [start + i for start in starts for i in range(whole)] and counts <= {batch}
    else:
        assert covered == list(range(50))
        assert all(0 < count <= batch + 1 for mine in runs for _, count in mine)


def test_what_cannot_be_shared_out_is_refused(source):
    with pytest.raises(UsageError, match="51 ranks for 50 samples"):
        source.batches(4)._left(0, 51)
    with pytest.raises(UsageError, match="batch_size must be at least 1, got 0"):
        source.batches(0)
    with pytest.raises(UsageError, match=r"share is \(index, number\).*got \(2, 2\)"):
        source.batches(4, share=(2, 2))


class Place:
    """Pretends to be a rank of torch.distributed and a worker of a DataLoader."""

    def __init__(self, patch, rank=0, size=0, worker=0, num_workers=0):
        patch.setattr(torch.distributed, "is_initialized", lambda: size > 0)
        patch.setattr(torch.distributed, "get_rank", lambda: rank)
        patch.setattr(torch.distributed, "get_world_size", lambda: size)
        info = SimpleNamespace(id=worker, num_workers=num_workers) if num_workers else None
        patch.setattr("mpitrain.data.read.batches.get_worker_info", lambda: info)


@given(
    size=st.integers(1, 9), num_workers=st.integers(0, 5), by_sample=st.booleans(), batch=st.integers(1, 9)
)
@settings(max_examples=30)
def test_no_sample_twice_and_ranks_alike_over_any_ranks_and_workers(
    source, size, num_workers, by_sample, batch
):
    """By samples n % ranks are left out, by batches none."""
    items = source if by_sample else source.batches(batch, transform=lambda batch: batch["y"].tolist())
    seen, per_rank = [], []
    for rank in range(size):
        per_rank.append(0)
        for worker in range(max(1, num_workers)):
            with pytest.MonkeyPatch.context() as patch:
                Place(patch, rank, size, worker, num_workers)
                for item in items:
                    per_rank[-1] += 1
                    seen += [int(item["y"])] if by_sample else item
    assert len(set(seen)) == len(seen) == (50 - 50 % size if by_sample else 50)
    with pytest.MonkeyPatch.context() as patch:
        Place(patch, size - 1, size)
        assert set(per_rank) == {50 // size if by_sample else len(items)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_shards_themselves_are_an_iterable_dataset_of_samples(source, num_workers):
    assert isinstance(source, IterableDataset)
    shards, orders = Shards(source.pattern, source.window_chunks), []
    for epoch in range(2):
        shards.set_epoch(epoch)
        loader = DataLoader(shards, batch_size=8, num_workers=num_workers)
        orders.append(torch.cat([batch["y"] for batch in loader]).tolist())
        with source.reader(source.scan(), 0) as reader:
            order = reader.order.samples(epoch, 0, 50).tolist()
        # each of two workers has half of it, and the loader takes their batches in turn
        parts = [order[:25], order[25:]] if num_workers else [order]
        batches = [[part[at : at + 8] for at in range(0, len(part), 8)] for part in parts]
        assert orders[-1] == [y for turn in zip(*batches, strict=True) for batch in turn for y in batch]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50)) and orders[0] != orders[1]
    assert shards == source and hash(shards) == hash(source)  # where a pass is, is no part of the value


@pytest.mark.parametrize("by_sample", [False, True])
def test_persistent_workers_see_the_epoch_change(source, by_sample):
    items = Shards(source.pattern, source.window_chunks) if by_sample else source.batches(8)
    items.set_epoch(0)
    how = {"batch_size": 8} if by_sample else {"batch_size": None}
    loader = DataLoader(items, num_workers=1, persistent_workers=True, **how)
    orders = []
    for epoch in range(2):
        items.set_epoch(epoch)
        orders.append(torch.cat([batch["y"] for batch in loader]).tolist())
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("by_sample", [False, True])
def test_a_spawned_worker_knows_the_ranks_of_its_sender(source, by_sample):
    """It has no default group; without being told it would read every rank's samples."""
    with pytest.MonkeyPatch.context() as patch:
        Place(patch, rank=1, size=2)
        sent = pickle.dumps(source if by_sample else source.batches(5))
        here = pickle.loads(sent)
    with pytest.MonkeyPatch.context() as patch:
        Place(patch, num_workers=1)
        mine = [y for item in pickle.loads(sent) for y in item["y"].reshape(-1).tolist()]
    assert len(mine) == 25
    assert sum(item["y"].numel() for item in here) == 50  # no worker: what it says is of another process


def test_a_share_of_ones_own_is_for_scripts_without_a_default_group(source):
    parts = [source.batches(10, share=(index, 3)) for index in range(3)]
    seen = [torch.cat([batch["y"] for batch in part]).tolist() for part in parts]
    assert sorted(sum(seen, [])) == list(range(50)) and {len(part) for part in parts} == {2}
