"""Batches are what plain h5py gives, whatever the layout, the cache, the prefetching or the dealing."""

import gc
import tempfile
import threading
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mpitrain.data import Shards
from mpitrain.data.read.chunk_cache import NUM_SPARE, ChunkCache, slots_for
from mpitrain.data.read.reader import ChunkReader
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.data.write.shard_file import write_shard
from mpitrain.devices import accelerator
from mpitrain.errors import DataError, UsageError

DTYPES = [
    "bool",
    "int8",
    "int64",
    "uint8",
    "uint16",
    "float16",
    "float32",
    "float64",
    "complex64",
    ">f4",
    ">i2",
]


def samples(num: int, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, (num, *shape))
    return (values % 2 if dtype == "bool" else values).astype(dtype)


def pack_plain(
    directory: Path, counts: list[int], chunk: int, shape: tuple[int, ...] = (3,)
) -> dict[str, np.ndarray]:
    """Shards of ours; returns all samples in file order."""
    arrays = {"x": samples(sum(counts), shape, "float32", 1), "y": np.arange(sum(counts))}
    for number, end in enumerate(np.cumsum(counts).tolist()):
        write_shard(directory / f"s-{number:03d}.h5", arrays, np.arange(end - counts[number], end), chunk)
    return arrays


@given(st.data())
@settings(max_examples=40)
def test_any_layout_reads_as_plain_h5py_reads_it(data):
    """Files of others: any dtype, byte order, chunk shape (or none), compression, several arrays."""
    shapes = st.sampled_from([(), (1,), (3,), (2, 4)])
    names = data.draw(st.lists(st.sampled_from(["a", "x", "y"]), min_size=1, max_size=3, unique=True))
    kinds = {name: (data.draw(shapes), data.draw(st.sampled_from(DTYPES))) for name in names}
    counts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as directory:
        for number, count in enumerate(counts):
            with h5py.File(f"{directory}/part{number}.h5", "w") as file:
                for name, (shape, dtype) in kinds.items():
                    chunks = data.draw(st.none() | st.tuples(*(st.integers(1, n) for n in (count, *shape))))
                    how = {"compression": "gzip"} if chunks and data.draw(st.booleans()) else {}
                    file.create_dataset(name, data=samples(count, shape, dtype, number), chunks=chunks, **how)
        source = Shards(f"{directory}/*.h5", window_chunks=data.draw(st.integers(1, 3)))
        catalogue = source.scan()
        expected = {}
        for name in names:
            parts = []
            for path in sorted(Path(directory).glob("*.h5")):
                with h5py.File(path) as file:
                    parts.append(file[name][()])
            expected[name] = np.concatenate(parts)
        size = data.draw(st.integers(1, 40))
        with source.reader(catalogue, seed=7) as reader:
            for start in range(0, catalogue.num_samples, size):
                count = min(size, catalogue.num_samples - start)
                ids = reader.order.samples(3, start, count)
                check(reader.batch(3, start, count), {name: array[ids] for name, array in expected.items()})
            first = 0
            for batch in reader.sequential(size):
                end = first + len(next(iter(batch.values())))
                check(batch, {name: array[first:end] for name, array in expected.items()})
                first = end
            assert first == catalogue.num_samples


def check(batch: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> None:
    assert set(batch) == set(expected)
    for name, array in expected.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert batch[name].shape == array.shape
        assert batch[name].numpy().dtype == native.dtype
        assert np.array_equal(batch[name].numpy(), native)


@given(
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    chunk=st.integers(1, 7),
    window=st.integers(1, 4),
    size=st.integers(1, 30),
    num_slots=st.none() | st.integers(1, 4),
    hand_over_bytes=st.sampled_from([0, 1 << 20]),
)
@settings(max_examples=50)
def test_prefetching_and_the_size_of_the_cache_change_nothing(
    counts, chunk, window, size, num_slots, hand_over_bytes
):
    """Whoever puts a batch together, the thread or the caller."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpitrain.data.read.prefetch.HAND_OVER_BYTES", hand_over_bytes)
        pack_plain(Path(directory), counts, chunk)
        catalogue = Shards(f"{directory}/*.h5", window).scan()
        runs = [
            (epoch, start, min(size, catalogue.num_samples - start))
            for epoch in (0, 1)
            for start in range(0, catalogue.num_samples, size)
        ]
        cache = ChunkCache(catalogue, ShardFiles(catalogue), num_slots)
        with (
            Shards(f"{directory}/*.h5", window).reader(catalogue, 5) as plain,
            ChunkReader(catalogue, 5, cache) as reader,
        ):
            for run, following in zip(runs, [*runs[1:], None]):
                batch = reader.batch(*run)
                if following:
                    reader.prefetch(*following)
                for name, tensor in plain.batch(*run).items():
                    assert torch.equal(batch[name], tensor)
            for epoch in (0, 1):
                passed = [run[1:] for run in runs if run[0] == epoch]
                for run, batch in zip(passed, reader.batches(epoch, passed), strict=True):
                    for name, tensor in plain.batch(epoch, *run).items():
                        assert torch.equal(batch[name], tensor)


@pytest.mark.parametrize("prefetch", [False, True])
@given(
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    chunk=st.integers(1, 7),
    window=st.integers(1, 4),
    size=st.integers(1, 30),
)
@example(counts=[25] * 5, chunk=2, window=8, size=1)  # reading ahead must spare what this window still needs
@settings(max_examples=20)
def test_no_chunk_is_read_twice_in_an_epoch(prefetch, counts, chunk, window, size):
    """Read ahead, a batch that is larger than a window may push out a chunk that the next one needs."""
    assume(not prefetch or size <= window * chunk)
    num_epochs = 4
    with tempfile.TemporaryDirectory() as directory:
        pack_plain(Path(directory), counts, chunk)
        catalogue = Shards(f"{directory}/*.h5", window).scan()
        cache = ChunkCache(catalogue, ShardFiles(catalogue))
        with ChunkReader(catalogue, 5, cache) as reader:
            for epoch in range(num_epochs):
                before = cache.num_reads
                for start in range(0, catalogue.num_samples, size):
                    run = epoch, start, min(size, catalogue.num_samples - start)
                    if prefetch:
                        reader.prefetch(*run)
                        reader._ahead.settle()
                    reader.batch(*run)
                assert cache.num_reads - before <= catalogue.num_chunks
                assert epoch > 0 or cache.num_reads == catalogue.num_chunks


def test_runs_of_no_samples_are_batches_too(tmp_path):
    pack_plain(tmp_path, [96], 96, shape=(16,))
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 3) as reader:
        runs = [(0, 0), (0, 32), (32, 0), (32, 0), (32, 32), (64, 32), (96, 0)]
        assert [len(batch["y"]) for batch in reader.batches(0, runs)] == [count for _, count in runs]
        assert list(reader.batches(0, [])) == []


def test_batches_that_were_gathered_together_are_separate(tmp_path):
    """One may be changed in place, under autograd too, and what another holds stays."""
    pack_plain(tmp_path, [96], 96, shape=(16,))
    source = Shards(f"{tmp_path}/*.h5")
    catalogue = source.scan()
    runs = [(start, 32) for start in range(0, 96, 32)]
    with source.reader(catalogue, 3) as reader, source.reader(catalogue, 3) as plain:
        found = list(reader.batches(0, runs))
        assert len({batch["x"].untyped_storage().data_ptr() for batch in found}) == 1  # they were
        weight = torch.ones(16, requires_grad=True)
        found[0]["x"].mul_(weight)
        found[0]["x"].sum().backward()
        found[1]["x"].zero_()
        assert torch.equal(weight.grad, plain.batch(0, 0, 32)["x"].sum(0))
        assert torch.equal(found[2]["x"], plain.batch(0, 64, 32)["x"])


@pytest.mark.parametrize("kind", [DataError, MemoryError])
def test_damage_is_told_by_the_batches_that_need_it(tmp_path, kind):
    """The others come, though they would have been gathered together with it; and nobody waits for ever."""
    pack_plain(tmp_path, [64], 16, shape=(16,))
    source = Shards(f"{tmp_path}/*.h5", window_chunks=2)
    catalogue = source.scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    with ChunkReader(catalogue, 3, cache) as reader:
        order = reader.order.epoch(0)
        damaged = int(order.chunks_of(1)[1])
        load = cache.load

        def refuse(chunk):
            if chunk == damaged:
                raise kind("damaged")
            load(chunk)

        cache.load = refuse
        runs = [(start, 8) for start in range(0, 64, 8)]
        first = next(number for number, run in enumerate(runs) if damaged in order.locate(*run)[0])
        batches = reader.batches(0, runs)
        assert sum(1 for _ in zip(range(first), batches)) == first == 4
        with pytest.raises(kind, match="damaged"):
            next(batches)


def test_the_next_window_is_read_while_this_one_is_used(tmp_path):
    """From a window's first batch on, the next window is read, so nothing is left to read when it begins; and the two
    chunks besides for which there is room, so that reading does not stop while that one's first batch is gathered."""
    pack_plain(tmp_path, [100], 5)
    catalogue = Shards(f"{tmp_path}/*.h5", window_chunks=4).scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    with ChunkReader(catalogue, 0, cache) as reader:
        reads = []
        for start in range(0, 100, 5):
            reader.prefetch(0, start, 5)
            reader.batch(0, start, 5)
            reader._ahead.settle()
            reads.append(cache.num_reads)
    assert reads[3::4] == [10, 14, 18, 20, 20]
    assert reads == sorted(reads) and reads[4] == 14 and reads[8] == 18 and reads[12] == 20


def test_validation_reads_on_as_well(tmp_path):
    pack_plain(tmp_path, [100], 5)
    catalogue = Shards(f"{tmp_path}/*.h5", window_chunks=4).scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    with ChunkReader(catalogue, 0, cache) as reader:
        batches = reader.sequential(5)
        next(batches)
        reader._ahead.settle()
        assert cache.num_reads == 5  # its own chunk and four more
        assert len(list(batches)) == 19 and cache.num_reads == 20


def read_an_epoch(source: Shards, batch_size: int) -> int:
    """Peak of what Python and numpy allocate meanwhile, in bytes; asserts that it is within the stated bound."""
    catalogue = source.scan()
    tracemalloc.start()
    try:
        with source.reader(catalogue, 0) as reader:
            for epoch in range(2):
                for start in range(0, catalogue.num_samples, batch_size):
                    count = min(batch_size, catalogue.num_samples - start)
                    reader.prefetch(epoch, start, count)
                    reader.batch(epoch, start, count)
            peak = tracemalloc.get_traced_memory()[1]
            arena = sum(array.nbytes for array in reader._store._arena.values())
            assert arena < peak <= reader.memory_bytes + HANDLES_BYTES
    finally:
        tracemalloc.stop()
    return peak


HANDLES_BYTES = 300_000  # open files, the thread, modules


def test_memory_stays_within_the_stated_bound_on_shards_ten_times_larger(tmp_path):
    """The bound does not grow with the data but by 96 bytes a chunk, and what is allocated stays below it."""
    peaks, bounds = [], []
    for name, counts in ("small", [2_000] * 2), ("large", [20_000] * 2):
        (tmp_path / name).mkdir()
        pack_plain(tmp_path / name, counts, 100, shape=(100,))
        source = Shards(f"{tmp_path / name}/*.h5", 3)
        peaks.append(read_an_epoch(source, 64))
        with source.reader(source.scan(), 0) as reader:
            bounds.append(reader.memory_bytes)
    slots, chunk_bytes = 2 * 3 + 2, 100 * 408
    assert bounds[0] == slots * chunk_bytes + 64 * 300 + 96 * 40
    assert bounds[1] - bounds[0] == 96 * 360
    assert peaks[1] < peaks[0] + 96 * 360 + 100_000  # while the data grew by 14 MB


def test_a_tight_cache_keeps_one_window(tmp_path):
    pack_plain(tmp_path, [400], 10)
    catalogue = Shards(f"{tmp_path}/*.h5", 3).scan()
    assert slots_for(catalogue) == 8
    assert slots_for(catalogue, cache_bytes=0) == 4  # the window itself is never given up
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    cache.close()
    assert cache._arena == {}


def test_memory_of_a_batch_is_used_again_once_nothing_of_it_is_left(tmp_path):
    """64 KiB and more; any view keeps all of it."""
    arrays = pack_plain(tmp_path, [64], 64, shape=(256,))
    source = Shards(f"{tmp_path}/*.h5", arrays=("x",))
    with source.reader(source.scan(), 0) as reader:
        ids = reader.order.samples(0, 0, 64)
        first = reader.batch(0, 0, 64)["x"]
        address, view = first.data_ptr(), first[3:5].numpy()
        del first
        assert reader.batch(0, 0, 64)["x"].data_ptr() != address
        assert np.array_equal(view, arrays["x"][ids[3:5]])
        del view
        assert reader.batch(0, 0, 64)["x"].data_ptr() == address
        held = [reader.batch(0, 0, 64)["x"] for _ in range(20)]
        assert len({tensor.data_ptr() for tensor in held}) == 20
        assert all(np.array_equal(tensor, arrays["x"][ids]) for tensor in held)
        del held
        assert len(reader._store._buffers._spare["x"]) == NUM_SPARE
    assert not reader._store._buffers._spare["x"]


def test_a_batch_that_its_caller_changed_comes_whole_when_it_is_asked_for_again(tmp_path):
    """Small batches in turn are parts of one memory, and each of them belongs to the caller."""
    arrays = pack_plain(tmp_path, [256], 64, shape=(16,))
    source = Shards(f"{tmp_path}/*.h5", arrays=("x",))
    with source.reader(source.scan(), 0) as reader:
        gather, gathered = reader._store.gather, []
        reader._store.gather = lambda *where: (gathered.append(len(where[0])), gather(*where))[1]
        for start in (0, 8, 16, 24, 16, 24, 32, 8, 16):
            reader.prefetch(0, start, 8)
            batch = reader.batch(0, start, 8)["x"]
            assert np.array_equal(batch, arrays["x"][reader.order.samples(0, start, 8)])
            batch.zero_()
        assert gathered == [8, 248, 8, 232, 8, 240]  # what comes in turn is gathered together


def test_a_damaged_sample_is_told_by_the_batch_that_needs_it(tmp_path):
    """And by none of those that are gathered together with it."""
    arrays = pack_plain(tmp_path, [256], 64, shape=(16,))
    source = Shards(f"{tmp_path}/*.h5", arrays=("x",))
    with source.reader(source.scan(), 0) as reader:
        gather = reader._store.gather
        bad_chunk, bad_row = (places[100] for places in reader.order.epoch(0).locate(0, 256))

        def gather_but_one(chunks, rows):
            if ((chunks == bad_chunk) & (rows == bad_row)).any():
                raise DataError("damaged")
            return gather(chunks, rows)

        reader._store.gather = gather_but_one
        for start in range(0, 256, 8):
            if start <= 100 < start + 8:
                with pytest.raises(DataError):
                    reader.batch(0, start, 8)
            else:
                expected = arrays["x"][reader.order.samples(0, start, 8)]
                assert np.array_equal(reader.batch(0, start, 8)["x"], expected)


def test_what_is_being_copied_from_is_not_read_over(tmp_path):
    """With one place, a chunk that another thread wants waits for the batch that is being copied."""
    arrays = pack_plain(tmp_path, [20], 10)
    catalogue = Shards(f"{tmp_path}/*.h5").scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue), num_slots=1)
    cache.load(0)
    other, seen = threading.Thread(target=cache.load, args=(1,)), []

    class Watched(np.ndarray):
        def take(self, *args, **kwargs):
            if not seen:
                other.start()
                for _ in range(3000):  # until it has come: it waits, or it has taken the place
                    if cache._table._waiters or cache._chunk_in[0] != 0:
                        break
                    other.join(0.01)
            seen.append(int(cache._chunk_in[0]))
            return np.asarray(self).take(*args, **kwargs)

    cache._arena = {name: array.view(Watched) for name, array in cache._arena.items()}
    batch = cache.gather(np.zeros(10, np.int64), np.arange(10))
    other.join()
    assert seen == [0, 0] and cache._chunk_in[0] == 1
    assert np.array_equal(batch["x"], arrays["x"][:10])


def test_a_reader_that_nobody_closed_ends_its_thread(tmp_path):
    pack_plain(tmp_path, [10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    reader = source.reader(source.scan(), 0)
    reader.prefetch(0, 0, 4)
    thread = reader._ahead._thread
    del reader
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_batches_belong_to_the_caller(tmp_path):
    pack_plain(tmp_path, [10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        before = reader.batch(0, 0, 10)
        for tensor in before.values():
            tensor.zero_()
        assert reader.batch(0, 0, 10)["y"].sum() == 45


def test_a_hint_is_used_and_its_error_comes_with_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.read.prefetch.HAND_OVER_BYTES", 0)
    pack_plain(tmp_path, [10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    catalogue = source.scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    threads = []
    gather = cache.gather
    cache.gather = lambda *where: (threads.append(threading.current_thread()), gather(*where))[1]
    with ChunkReader(catalogue, 0, cache) as reader:
        reader.prefetch(0, 0, 4)
        reader.prefetch(0, 8, 4)  # past the end
        reader._ahead.settle()
        reader.batch(0, 0, 4)
        with pytest.raises(UsageError, match="outside the epoch"):
            reader.batch(0, 8, 4)
    assert [thread is threading.main_thread() for thread in threads] == [False]


def test_closing_ends_the_thread_and_closes_the_files(tmp_path):
    pack_plain(tmp_path, [10, 10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    reader = source.reader(source.scan(), 0)
    reader.batch(0, 0, 20)
    reader.prefetch(1, 0, 20)
    assert any(thread.name.startswith("mpitrain-prefetch") for thread in threading.enumerate())
    assert open_in(tmp_path)
    reader.close()
    reader.close()
    assert not any(thread.name.startswith("mpitrain-prefetch") for thread in threading.enumerate())
    assert not open_in(tmp_path)
    reader.prefetch(0, 0, 4)  # a hint to a closed reader is nothing
    with pytest.raises(UsageError, match="reader is closed"):
        reader.batch(0, 0, 4)
    with pytest.raises(UsageError, match="reader is closed"):
        next(reader.sequential(4))


def test_closing_waits_for_what_the_thread_is_doing(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.read.prefetch.HAND_OVER_BYTES", 0)
    pack_plain(tmp_path, [10], 4)
    catalogue = Shards(f"{tmp_path}/*.h5").scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    started, release, finished = threading.Event(), threading.Event(), []

    def slow_gather(*_):
        started.set()
        assert release.wait(30)
        finished.append(True)
        return {}

    cache.gather = slow_gather
    reader = ChunkReader(catalogue, 0, cache)
    reader.prefetch(0, 0, 4)
    assert started.wait(30)
    threading.Timer(0.05, release.set).start()
    reader.close()
    assert finished


def open_in(directory: Path) -> list[str]:
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [target for link in links if (target := str(link.readlink())).startswith(str(directory))]


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.read.shard_files.MAX_OPEN_FILES", 3)
    pack_plain(tmp_path, [2] * 10, 2)
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        assert sorted(reader.batch(0, 0, 20)["y"].tolist()) == list(range(20))
        assert len(open_in(tmp_path)) == 3


def test_batches_are_pinned_where_the_process_computes_on_a_device(tmp_path, monkeypatch):
    """A stand-in: it records that pinned memory is asked for, which this machine cannot give."""
    pinned, empty = [], torch.empty

    def stand_in(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    arrays = pack_plain(tmp_path, [10], 4)
    monkeypatch.setattr(accelerator, "is_begun", lambda: True)
    monkeypatch.setattr(accelerator, "accelerator_pins", lambda: True)
    monkeypatch.setattr(torch, "empty", stand_in)
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        batch = reader.batch(0, 0, 10)
        assert np.array_equal(batch["x"], arrays["x"][reader.order.samples(0, 0, 10)])
    assert pinned == [True, True]
