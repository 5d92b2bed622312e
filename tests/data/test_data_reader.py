"""Batches are what plain h5py gives, whatever the layout, the cache, the prefetching or the dealing."""

import tempfile
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpitrain.data import Reader, Shards
from mpitrain.data.cache import ChunkCache, slots_for
from mpitrain.data.files import ShardFiles
from mpitrain.data.write import write_shard
from mpitrain.errors import UsageError

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
)
@settings(max_examples=25)
def test_prefetching_and_the_size_of_the_cache_change_nothing(counts, chunk, window, size, num_slots):
    with tempfile.TemporaryDirectory() as directory:
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
            Reader(catalogue, 5, cache) as reader,
        ):
            for run, following in zip(runs, [*runs[1:], None]):
                batch = reader.batch(*run)
                if following:
                    reader.prefetch(*following)
                for name, tensor in plain.batch(*run).items():
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
    num_epochs = 4
    with tempfile.TemporaryDirectory() as directory:
        pack_plain(Path(directory), counts, chunk)
        catalogue = Shards(f"{directory}/*.h5", window).scan()
        cache = ChunkCache(catalogue, ShardFiles(catalogue))
        with Reader(catalogue, 5, cache) as reader:
            for epoch in range(num_epochs):
                before = cache.num_reads
                for start in range(0, catalogue.num_samples, size):
                    run = epoch, start, min(size, catalogue.num_samples - start)
                    if prefetch:
                        reader.prefetch(*run)
                        finish(reader)
                    reader.batch(*run)
                assert cache.num_reads - before <= catalogue.num_chunks
                assert epoch > 0 or cache.num_reads == catalogue.num_chunks


def finish(reader: Reader) -> None:
    """Wait until the thread has done all it had to."""
    assert reader._executor is not None
    reader._executor.submit(int).result()


def test_the_next_window_is_read_while_this_one_is_used(tmp_path):
    """Each hint reads on by as much as the window has been used, so its last batch finds the next one read."""
    pack_plain(tmp_path, [100], 5)
    catalogue = Shards(f"{tmp_path}/*.h5", window_chunks=4).scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    with Reader(catalogue, 0, cache) as reader:
        reads = []
        for start in range(0, 60, 5):
            reader.prefetch(0, start, 5)
            reader.batch(0, start, 5)
            finish(reader)
            reads.append(cache.num_reads)
        assert reads == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
        reader.batch(0, 60, 20)
        assert cache.num_reads == 16


def test_memory_is_bounded_by_two_windows_not_by_the_data(tmp_path):
    counts, chunk, window = [400] * 5, 10, 3
    pack_plain(tmp_path, counts, chunk)
    catalogue = Shards(f"{tmp_path}/*.h5", window).scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    bound = (2 * window + 2) * chunk * catalogue.sample_bytes
    assert cache.memory_bytes == sum(array.nbytes for array in cache._arena.values()) == bound
    assert bound < catalogue.num_samples * catalogue.sample_bytes / 20
    cache.close()
    assert cache._arena == {}
    assert slots_for(catalogue, cache_bytes=0) == window + 1  # the window itself is never given up


def test_batches_belong_to_the_caller(tmp_path):
    pack_plain(tmp_path, [10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        before = reader.batch(0, 0, 10)
        for tensor in before.values():
            tensor.zero_()
        assert reader.batch(0, 0, 10)["y"].sum() == 45


def test_a_hint_is_used_and_its_error_comes_with_the_batch(tmp_path):
    pack_plain(tmp_path, [10], 4)
    source = Shards(f"{tmp_path}/*.h5")
    catalogue = source.scan()
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    threads = []
    gather = cache.gather
    cache.gather = lambda *where: (threads.append(threading.current_thread()), gather(*where))[1]
    with Reader(catalogue, 0, cache) as reader:
        reader.prefetch(0, 0, 4)
        reader.prefetch(0, 8, 4)  # past the end
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


def test_closing_waits_for_what_the_thread_is_doing(tmp_path):
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
    reader = Reader(catalogue, 0, cache)
    reader.prefetch(0, 0, 4)
    assert started.wait(30)
    threading.Timer(0.05, release.set).start()
    reader.close()
    assert finished


def open_in(directory: Path) -> list[str]:
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [target for link in links if (target := str(link.readlink())).startswith(str(directory))]


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.files.MAX_OPEN_FILES", 3)
    pack_plain(tmp_path, [2] * 10, 2)
    source = Shards(f"{tmp_path}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        assert sorted(reader.batch(0, 0, 20)["y"].tolist()) == list(range(20))
        assert len(open_in(tmp_path)) == 3
