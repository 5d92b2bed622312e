"""Datasets of torch as sources: dealt by position, made by any number of processes, the same to the bit."""

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)  # fmt: skip
from torch.utils.data.distributed import DistributedSampler

import mpitrain as mt
from mpitrain.data.datasets import streams
from mpitrain.data.datasets.loaders import adopt
from mpitrain.errors import DataError, UsageError
from tests import toy

X = torch.arange(77 * 3, dtype=torch.float32).reshape(77, 3)
PLAIN = TensorDataset(X, torch.arange(77))
RUNS = [
    (0, 0, 8),
    (0, 8, 8),
    (0, 16, 8),
    (0, 24, 8),
    (0, 60, 8),
    (0, 3, 8),
    (1, 0, 9),
    (1, 18, 9),
    (1, 36, 41),
]


class Noisy(Dataset):
    """Draws from all three generators; knows which process it is in."""

    def __len__(self):
        return 77

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return {"x": X[index] + torch.tensor(drawn), "pid": os.getpid()}


class Hurt(Dataset):
    """What goes wrong with sample 40 is `how`."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 77

    def __getitem__(self, index):
        if index != 40:
            return {"x": X[index]}
        if self.how == "raise":
            return {"x": X[index][99]}
        if self.how == "exit":
            os._exit(7)
        if self.how == "hang":
            time.sleep(60)
        return {
            "shape": {"x": X[index][:2]},
            "name": {"z": X[index]},
            "text": {"x": "forty"},
            "three": (1, 2, 3),
        }[self.how]


class Flow(IterableDataset):
    """Shuffled by Python's generator, with noise of torch's."""

    def __init__(self, count=77, length=77):
        self.count, self.length, self.epoch = count, length, 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.count))
        random.shuffle(order)
        for number in order:
            yield {"x": X[number % 77] + torch.rand(3), "n": number, "epoch": self.epoch}


def read(source, runs=RUNS, seed=3):
    with source.reader(source.scan(), seed) as reader:
        return [reader.batch(*run) for run in runs]


def same(first, second, names=None):
    for one, other in zip(first, second, strict=True):
        for name in names or one.keys():
            assert torch.equal(one[name], other[name]), name
    return True


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with mt.ShardWriter(folder) as writer:
        writer.add({"x": X.numpy(), "y": np.arange(77)})
    return mt.Shards(f"{folder}/*.h5")


def test_a_dataset_is_dealt_in_the_order_of_shards_with_the_same_samples(shards):
    assert same(read(shards), read(mt.Samples(PLAIN)))
    assert same(read(shards), read(mt.Samples(PLAIN, num_workers=2)))
    for batch_size in (8, 77):
        with (
            shards.reader(shards.scan(), 0) as one,
            (source := mt.Samples(PLAIN, num_workers=1)).reader(source.scan(), 0) as other,
        ):
            assert same(one.sequential(batch_size, 5, 70), other.sequential(batch_size, 5, 70))
            assert same(one.sequential(batch_size), other.sequential(batch_size))


def test_it_is_so_with_chunks_and_windows(tmp_path):
    with mt.ShardWriter(tmp_path) as writer:
        writer.add({"x": X.numpy(), "y": np.arange(77)})
    chunk = mt.Shards(f"{tmp_path}/*.h5").scan().files[0].chunk_samples
    source = mt.Samples(PLAIN, chunk_samples=chunk, window_chunks=8)
    assert same(read(mt.Shards(f"{tmp_path}/*.h5")), read(source))
    small = mt.Samples(PLAIN, chunk_samples=5, window_chunks=2)
    assert small.scan().window_samples == 10
    once = read(small, [(0, start, 11) for start in range(0, 77, 11)])
    assert sorted(torch.cat([batch["y"] for batch in once]).tolist()) == list(range(77))


def test_random_numbers_belong_to_the_sample_whoever_makes_it():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    alone = read(mt.Samples(Noisy()))
    drawn = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert drawn == (torch.rand(()), random.random(), np.random.rand())  # as if nothing had been drawn
    helped = read(mt.Samples(Noisy(), num_workers=3))
    assert same(alone, helped, ["x"])
    pids = torch.cat([batch["pid"] for batch in helped]).unique()
    assert os.getpid() not in pids and len(pids) > 1
    cut = read(mt.Samples(Noisy()), [(0, 8, 5), (0, 13, 3)])
    assert torch.equal(torch.cat([batch["x"] for batch in cut]), alone[1]["x"])
    assert not torch.equal(read(mt.Samples(Noisy()), seed=4)[0]["x"], alone[0]["x"])


def test_leases_at_even_distances_are_made_before_they_are_asked_for():
    source = mt.Samples(PLAIN, num_workers=2, prefetch_factor=2)
    with source.reader(source.scan(), 0) as reader:
        for start in range(0, 64, 8):
            reader.batch(0, start, 4)
            ahead = {run[1] for run in reader._ahead}
            assert start < 32 or ahead >= {start + 8, start + 16} or start + 16 > 73
        assert len(reader._ahead) <= 4
        reader.prefetch(0, 3, 4)
        assert same([reader.batch(0, 3, 4)], read(mt.Samples(PLAIN), [(0, 3, 4)], seed=0))


class Garbage:
    """As what CUDA knows of, it can be given back by the process that made it only; no count of references frees it."""

    def __init__(self):
        self.itself, self.made_by = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.made_by:
            os._exit(77)


class Collecting(Dataset):
    def __len__(self):
        return 77

    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None:
            gc.collect()
        return {"x": X[index]}


def test_processes_collect_no_garbage_of_the_rank():
    gc.collect()
    with gc_at_rest():
        Garbage()
        assert "x" in read(mt.Samples(Collecting(), num_workers=1), [(0, 0, 4)])[0]
    gc.collect()


@contextlib.contextmanager
def gc_at_rest():
    """Nothing is collected here, and what was on is on again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "Hurt: sample 40 cannot be made: IndexError: index 99 is out of bounds.*test_datasets.py, line"),
        ("shape", r"Hurt: 'x' of sample 40 is float32\[2\], expected float32\[3\] as of sample .*collate_fn"),
        ("name", "Hurt: sample 40 has z, expected x as sample"),
        ("text", "Hurt: 'x' of sample 40 is str, expected float32"),
        ("three", "Hurt: sample 40 has 0, 1, 2, expected x as sample"),
    ],
)  # fmt: skip
def test_a_sample_that_is_wrong_is_named(num_workers, how, text):
    source = mt.Samples(Hurt(how), num_workers=num_workers)
    with source.reader(source.scan(), 0) as reader:
        with pytest.raises(DataError, match=text):
            list(reader.sequential(30))
        assert len(next(reader.sequential(30))["x"]) == 30  # others can still be read


def test_a_process_that_dies_or_hangs_is_named():
    source = mt.Samples(Hurt("exit"), num_workers=1)
    with (
        source.reader(source.scan(), 0) as reader,
        pytest.raises(DataError, match="process 0 .* exit code 7"),
    ):
        list(reader.sequential(30))
    source = mt.Samples(Hurt("hang"), num_workers=1, timeout=0.5)
    reader = source.reader(source.scan(), 0)
    with pytest.raises(DataError, match="has made no batch for 0.5 s"):
        list(reader.sequential(77))
    for process in reader._workers._processes:
        process.kill()
    reader.close()


def test_what_cannot_be_sent_to_a_process_is_refused_by_name():
    class Local(Noisy):
        pass

    source = mt.Samples(Local(), num_workers=1, multiprocessing_context="spawn")
    text = "cannot be sent .* 'spawn' .*multiprocessing_context='fork'"
    with source.reader(source.scan(), 0) as reader, pytest.raises(UsageError, match=text):
        reader.batch(0, 0, 4)
    assert read(mt.Samples(Local(), num_workers=1), [(0, 0, 4)])  # forked


def test_a_process_is_begun_as_torchs_are_and_ends_with_its_reader():
    seen = []

    def begin(worker):
        info = torch.utils.data.get_worker_info()
        assert (info.id, info.num_workers) == (worker, 2) and len(info.dataset) == 77
        info.dataset.tag = 9

    class Tagged(Noisy):
        tag = 0

        def __getitem__(self, index):
            return {"tag": self.tag}

    source = mt.Samples(Tagged(), num_workers=2, worker_init_fn=begin)
    with source.reader(source.scan(), 0) as reader:
        assert set(reader.batch(0, 0, 8)["tag"].tolist()) == {9}
        seen = [process.pid for process in reader._workers._processes]
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    wrong = mt.Samples(Tagged(), num_workers=1, worker_init_fn=lambda worker: 1 / 0)
    with (
        wrong.reader(wrong.scan(), 0) as reader,
        pytest.raises(DataError, match="worker_init_fn.0. has failed"),
    ):
        reader.batch(0, 0, 8)


def test_batches_are_named_as_samples_are():
    Pair = namedtuple("Pair", ["image", "label"])
    named = [Pair(X[index], index) for index in range(77)]
    assert set(mt.Samples(named).scan().arrays) == {"image", "label"}
    assert set(mt.Samples([X[index] for index in range(77)]).scan().arrays) == {"x"}
    padded = mt.Samples(
        PLAIN, collate_fn=lambda items: (torch.stack([x for x, _ in items]), np.arange(len(items)))
    )
    assert read(padded, [(0, 0, 5)])[0]["y"].tolist() == [0, 1, 2, 3, 4]
    for collate_fn, text in {
        lambda items: {"x": torch.zeros(3)}: "a batch of 3 rows from 1 samples",
        lambda items: {}: "an empty batch",
        lambda items: 1 / 0: "make no batch: ZeroDivisionError",
    }.items():
        with pytest.raises(DataError, match=text):
            mt.Samples(PLAIN, collate_fn=collate_fn).scan()
    with pytest.raises(DataError, match="list: holds no samples"):
        mt.Samples([]).scan()


def test_every_rank_must_have_the_same_dataset():
    with pytest.raises(DataError, match="has 77 samples here and 76 on rank 0"):
        mt.Samples(PLAIN).reader(mt.Samples(TensorDataset(X[:76], X[:76])).scan(), 0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_dealt_by_position(num_workers):
    source = mt.Stream(Flow(), num_workers=num_workers)
    whole = read(source, [(0, 0, 77), (1, 0, 77)])
    assert [sorted(batch["n"].tolist()) for batch in whole] == [list(range(77))] * 2
    assert whole[0]["n"].tolist() != whole[1]["n"].tolist()
    assert [batch["epoch"].unique().tolist() for batch in whole] == [[0], [1]]
    for run, batch in zip(RUNS, read(source), strict=True):  # some of them lie before others
        part = {name: tensor[run[1] : run[1] + run[2]] for name, tensor in whole[run[0]].items()}
        assert same([batch], [part])
    torch.manual_seed(1)
    before = torch.rand(())
    torch.manual_seed(1)
    read(source)
    assert before == torch.rand(())


def test_a_stream_keeps_what_it_passed_over_up_to_a_size(monkeypatch):
    flow, begun = Flow(), []
    monkeypatch.setattr(flow, "set_epoch", begun.append, raising=False)
    source = mt.Stream(flow)
    catalogue, one = source.scan(), 12 + 2 * 64  # of x, n and epoch
    monkeypatch.setattr(streams, "KEPT_BYTES", 8 * one)
    begun.clear()
    with source.reader(catalogue, 3) as reader:
        for start in range(0, 64, 16):
            reader.batch(0, start + 8, 8)
            reader.batch(0, start, 8)
        assert begun == [0]
        reader.batch(0, 70, 1)
        reader.batch(0, 64, 6)
        assert begun == [0]
        reader.batch(0, 0, 8)
        assert begun == [0, 0]


def test_a_stream_must_be_as_long_as_it_says():
    with pytest.raises(DataError, match="has ended after 70 samples, and an epoch has 77; give its length"):
        read(mt.Stream(Flow(count=70)), [(0, 60, 17)])
    with pytest.raises(DataError, match="has more samples than its length says, 77"):
        read(mt.Stream(Flow(count=80)), [(0, 60, 17)])
    assert read(mt.Stream(Flow(count=80), num_samples=77), [(0, 60, 17)])
    endless = type("Endless", (IterableDataset,), {"__iter__": lambda self: iter(int, 1)})()
    with pytest.raises(UsageError, match="Endless has no length.*num_samples=N"):
        toy.make_job(data=endless)
    assert mt.Stream(endless, num_samples=5).scan().num_samples == 5
    with pytest.raises(UsageError, match="num_workers=2: each of them would pass over a stream of its own"):
        toy.make_job(data=DataLoader(Flow(), 4, num_workers=2))
    with pytest.raises(UsageError, match="generator can be passed over once only"):
        mt.Stream((one for one in X), num_samples=3)


def loader(**options):
    return DataLoader(PLAIN, 16, **options)


def test_a_loader_says_how_a_job_makes_its_batches():
    job = toy.make_job(data=loader(shuffle=True, drop_last=True, num_workers=1), batch_size=None)
    assert (job.batch_size, job.drop_last, job.data.num_workers) == (16, True, 1)
    assert toy.make_job(data=PLAIN, batch_size=None).batch_size == 32
    assert toy.make_job(data=loader(shuffle=True), batch_size=16).batch_size == 16
    with pytest.raises(UsageError, match="batch_size=8, and the DataLoader of data has batch_size=16"):
        toy.make_job(data=loader(shuffle=True), batch_size=8)
    drawn = adopt("data", loader(sampler=WeightedRandomSampler(torch.arange(77.0), 50))).source
    assert drawn.scan().num_samples == 50 and 0 not in read(drawn, [(0, 0, 50)])[0]["y"]
    assert isinstance(adopt("data", DataLoader(Flow(), 4, drop_last=True)).source, mt.Stream)
    assert isinstance(adopt("validate", loader()).source, mt.Samples)


SAMPLERS = {
    "does not shuffle.*write shuffle=True": lambda: loader(),
    "deals the samples over its ranks itself; write shuffle=True": lambda: loader(
        sampler=DistributedSampler(PLAIN, 2, 0)
    ),
    "Subset.dataset, indices": lambda: loader(sampler=SubsetRandomSampler([1, 2])),
    "draws 20 samples an epoch with replacement; write mpitrain.Weighted": lambda: loader(
        sampler=RandomSampler(PLAIN, True, 20)
    ),
    "replacement=True": lambda: loader(sampler=WeightedRandomSampler([1.0] * 77, 50, replacement=False)),
    "a sampler of its own, list": lambda: loader(sampler=[1, 2, 3]),
    "batch_sampler of its own": lambda: DataLoader(PLAIN, batch_sampler=[[1, 2]]),
    "batch_size=None": lambda: DataLoader(PLAIN, batch_size=None, shuffle=True),
    "a collate_fn, and Shards makes batches itself; write mpitrain.Transformed": lambda: DataLoader(
        mt.Shards("none.h5"), 4, collate_fn=list
    ),
}


@pytest.mark.parametrize("text", SAMPLERS)
def test_a_loader_that_contradicts_a_job_is_told_what_to_write(text):
    with pytest.raises(UsageError, match=f"Job: data's DataLoader .*{text}"):
        toy.make_job(data=SAMPLERS[text](), batch_size=None)


def test_validation_takes_every_sample_once():
    with pytest.raises(UsageError, match="validate's DataLoader has RandomSampler, and validation takes"):
        toy.make_job(validate=loader(shuffle=True))
    with pytest.raises(UsageError, match="validate counts every sample once"):
        toy.make_job(validate=mt.Weighted(PLAIN, [1.0] * 77))


def scaled(batch, random):
    """Numbers of the samples, and torch's own for each."""
    noise = random.each(lambda row: row + torch.rand(3), batch["x"])
    return {**batch, "x": noise + random.normal(3), "u": random.uniform(), "k": random.integers(5, 9, 2)}


def test_a_transform_draws_the_same_for_a_sample_in_every_batch_and_process(shards):
    expected = read(mt.Transformed(shards, scaled))
    for source in (mt.Samples(PLAIN), mt.Samples(PLAIN, num_workers=2)):
        assert same(read(mt.Transformed(source, scaled)), expected)
    cut = read(mt.Transformed(shards, scaled), [(0, 8, 5), (0, 13, 3)])
    for name in expected[1]:
        assert torch.equal(torch.cat([batch[name] for batch in cut]), expected[1][name])
    again = read(mt.Transformed(shards, scaled), [(1, 0, 77)])[0]
    assert again["u"].unique().numel() > 70 and set(again["k"].unique().tolist()) == {5, 6, 7, 8}


def test_a_transform_may_not_leave_samples_out():
    for function, text in {
        lambda batch, random: None: "must return the batch, .* got NoneType",
        lambda batch, random: {"x": batch["x"][:3]}: "was given 8 samples and has returned 3",
    }.items():
        with pytest.raises(DataError, match=text):
            read(mt.Transformed(PLAIN, function))


@pytest.mark.parametrize("chunk", [None, 7])
def test_draws_by_weight_come_as_often_as_their_weights_say(chunk):
    weights = torch.arange(77) % 5
    source = mt.Weighted(mt.Samples(PLAIN, chunk_samples=chunk, window_chunks=3), weights, 20_000)
    catalogue = source.scan()
    assert catalogue.num_samples == 20_000
    assert type(catalogue).from_json(catalogue.to_json()) == catalogue
    with source.reader(catalogue, 1) as reader:
        drawn = np.concatenate([reader.order.samples(0, start, 500) for start in range(0, 20_000, 500)])
        assert reader.batch(1, 19_990, 10)["y"].tolist() == reader.order.samples(1, 19_990, 10).tolist()
    counts = np.bincount(drawn, minlength=77)
    expected = weights.numpy() / weights.sum().item() * 20_000
    assert not counts[expected == 0].any()
    chi = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi < 61 + 5 * (2 * 61) ** 0.5  # 62 samples of positive weight
    assert same(read(source), read(source)) and not np.array_equal(drawn[:77], drawn[77:154])


def test_weights_that_are_none_are_refused():
    for weights, text in {
        (1.0, -1.0): "finite and not negative, got -1.0 for sample 1",
        (0.0, 0.0): "all weights are 0",
        (float("nan"), 1.0): "for sample 0",
        (): "one number a sample",
    }.items():
        with pytest.raises(UsageError, match=text):
            mt.Weighted(PLAIN, weights)
    with pytest.raises(DataError, match="2 weights for 77 samples"):
        mt.Weighted(PLAIN, [1, 2]).scan()
    for stream in (Flow(), mt.Transformed(Flow(), scaled)):
        with pytest.raises(UsageError, match="a stream come in its own order"):
            mt.Weighted(stream, [1] * 77).scan()


def test_philox_gives_the_published_numbers():
    """Known answers of Random123."""
    from mpitrain.data.read.sample_random import philox

    zeros = philox((0, 0), np.zeros(1, np.uint64), 0, 1)
    assert [f"{word:08x}" for word in zeros[0].tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_batches_of_any_source_serve_a_loop_of_ones_own():
    batches = functools.reduce(lambda count, batch: count + len(batch["y"]), mt.Samples(PLAIN).batches(10), 0)
    assert batches == 77
