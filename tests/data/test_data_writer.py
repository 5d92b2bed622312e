"""The writer: every sample once and in order, the same bytes however they come in, and never half a pack."""

import functools
import json
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mpitrain as mt
from mpitrain.data.format.manifest import NAME, Manifest, file_sha256
from mpitrain.errors import DataError, UsageError
from tests.data.mortal import die_at, no_power_cut  # noqa: F401

X, Y = np.arange(1000, dtype=np.float32).reshape(500, 2), np.arange(500)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def write(directory: Path, ends: list[int], **options: object) -> None:
    with mt.ShardWriter(directory, shard_samples=200, chunk_samples=64, **options) as writer:
        for start, end in zip([0, *ends], [*ends, 500]):
            if end > start:
                writer.add({"y": Y[start:end], "x": X[start:end]})


def in_order(directory: Path, pattern: str = "*.h5") -> dict[str, torch.Tensor]:
    source = mt.Shards(f"{directory}/{pattern}")
    catalogue = source.scan()
    with source.reader(catalogue, 0) as reader:
        parts = [dict(part) for part in reader.sequential(catalogue.num_samples)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("whole")
    write(directory, [])
    return Manifest.read(directory).sha256


def test_samples_come_back_in_order_and_the_index_tells_what_they_are(tmp_path, whole):
    write(tmp_path, [100, 101])
    back = in_order(tmp_path)
    assert np.array_equal(back["x"], X) and np.array_equal(back["y"], Y)
    manifest = Manifest.read(tmp_path)
    assert manifest.complete and manifest.files == {
        f"train-0000{i}.h5": n for i, n in enumerate([200, 200, 100])
    }
    assert manifest.sha256 == {name: file_sha256(tmp_path / name) for name in manifest.files} == whole
    assert manifest.arrays["x"] == {"shape": [2], "dtype": "float32", "variable": False}
    assert [file.chunk_samples for file in mt.Shards(f"{tmp_path}/*.h5").scan().files] == [64, 64, 64]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 499), max_size=20).map(sorted))
def test_the_bytes_do_not_depend_on_how_the_samples_come_in(tmp_path_factory, whole, ends):
    directory = tmp_path_factory.mktemp("pieces")
    write(directory, ends)
    assert Manifest.read(directory).sha256 == whole


def test_single_samples_tensors_and_reused_buffers(tmp_path, whole):
    buffer = torch.empty(2)
    with mt.ShardWriter(tmp_path, shard_samples=200, chunk_samples=64) as writer:
        for x, y in zip(torch.from_numpy(X), Y.tolist()):
            writer.add_sample({"x": buffer.copy_(x), "y": y})
    assert Manifest.read(tmp_path).sha256 == whole
    x, y = torch.empty(10, 2), np.empty(10, np.int64)
    with mt.ShardWriter(tmp_path / "again", shard_samples=200, chunk_samples=64) as writer:
        for start in range(0, 500, 10):
            x[:], y[:] = torch.from_numpy(X[start : start + 10]), Y[start : start + 10]
            writer.add({"x": x, "y": y})
    assert Manifest.read(tmp_path / "again").sha256 == whole


def test_splits_are_written_side_by_side(tmp_path):
    with mt.ShardWriter(tmp_path, chunk_samples=10) as writer:
        for start in range(0, 500, 50):
            writer.add({"y": Y[start : start + 40]})
            writer.add({"y": Y[start + 40 : start + 50]}, split="validate")
    assert names(tmp_path) == [NAME, "train-00000.h5", "validate-00000.h5"]
    assert np.array_equal(in_order(tmp_path, "validate-*.h5")["y"], Y[Y % 50 >= 40])
    assert np.array_equal(in_order(tmp_path, "train-*.h5")["y"], Y[Y % 50 < 40])


def test_a_few_samples_make_a_small_file_and_chunks_are_about_one_mebibyte(tmp_path):
    with mt.ShardWriter(tmp_path / "few") as writer:
        writer.add({"x": np.ones((3, 1024), np.float32)})
    assert (tmp_path / "few" / "train-00000.h5").stat().st_size < 20_000
    with mt.ShardWriter(tmp_path / "more") as writer:
        writer.add({"x": np.ones((1000, 1024), np.float32)})
    (info,) = mt.Shards(f"{tmp_path}/more/*.h5").scan().files
    assert (info.num_samples, info.chunk_samples) == (1000, 256)


@pytest.mark.parametrize("name", ["gzip", "gzip:9", "zstd", "zstd:1", "blosc"])
def test_compressed_shards_are_smaller_hold_sums_and_read_back(tmp_path, whole, name):
    if not name.startswith("gzip"):
        pytest.importorskip("hdf5plugin")
    write(tmp_path, [], compression=name)
    back = in_order(tmp_path)
    assert np.array_equal(back["x"], X) and np.array_equal(back["y"], Y)
    with h5py.File(tmp_path / "train-00000.h5") as file:
        assert file["x"].fletcher32 and file["x"].chunks == (64, 2)
        assert file["x"].id.get_storage_size() < X[:200].nbytes
    assert json.loads((tmp_path / NAME).read_text())["recipe"]["compression"].startswith(name)


@pytest.mark.parametrize("text", ["lzma", "gzip:0", "gzip:x", "zstd:99", ""])
def test_an_unknown_compression_is_refused_with_what_there_is(tmp_path, text):
    with pytest.raises(UsageError, match="expected none, gzip, zstd, blosc|the level of"):
        mt.ShardWriter(tmp_path, compression=text)


def test_a_plugin_that_is_not_there_is_named_with_its_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[compression\]'"):
        mt.ShardWriter(tmp_path, compression="zstd")


def test_a_shard_whose_filter_is_not_here_names_file_dataset_and_way_out(tmp_path, monkeypatch):
    import mpitrain.data.format.filters as filters

    write(tmp_path, [], compression="gzip")
    monkeypatch.setattr(filters.h5z, "filter_avail", lambda code: code != 1)
    path = f"{tmp_path}/train-00000.h5"
    with pytest.raises(DataError, match=f"{path}: dataset 'x' .*gzip:4.* here; store it with gzip, zstd"):
        mt.Shards(path).scan()


# ---- faults


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, OSError])
def test_an_error_inside_leaves_the_old_state(tmp_path, error):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(error), mt.ShardWriter(tmp_path, shard_samples=200) as writer:
        writer.add({"x": X, "y": Y})
        assert "train-00001.h5" in names(tmp_path)
        with pytest.raises(DataError, match="interrupted half-way"):
            mt.Shards(f"{tmp_path}/train-*.h5").scan()
        raise error
    assert names(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("limit", [0, 100, 600, 3000, 3900])
def test_a_full_disk_leaves_nothing_and_holds_nothing(tmp_path, limit):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(DataError, match="the disk is full.*Free space"):
            write(tmp_path, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == []
    held = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
    assert not [target for target in held if str(tmp_path) in target]
    write(tmp_path, [])


def test_killed_at_any_moment_it_is_refused_by_jobs_or_whole_and_can_be_done_again(
    tmp_path, whole, monkeypatch
):
    moment, interrupted = 1, 0
    while die_at(moment, functools.partial(write, directory := tmp_path / str(moment), [])):
        try:
            mt.Shards(f"{directory}/train-*.h5").scan()
            assert Manifest.read(directory).sha256 == whole
        except DataError as error:
            interrupted += "interrupted half-way" in str(error)
            write(directory, [])
        assert Manifest.read(directory).sha256 == whole and names(directory) == [NAME, *whole]
        moment += 2
    assert interrupted > 10


def test_what_is_there_already_is_left_alone(tmp_path):
    write(tmp_path / "a", [])
    with pytest.raises(UsageError, match="holds a finished pack"):
        write(tmp_path / "a", [])
    assert in_order(tmp_path / "a")["y"].numel() == 500
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train-00000.h5").write_text("mine")
    with pytest.raises(UsageError, match=r"train-00000\.h5, which no pack wrote"):
        write(tmp_path / "b", [])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "validate-00000.h5").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"validate-00000\.h5, which no pack wrote"),
        mt.ShardWriter(tmp_path / "c") as writer,
    ):
        writer.add({"y": Y})
        writer.add({"y": Y}, split="validate")
    assert names(tmp_path / "c") == ["validate-00000.h5"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X}, "has the arrays x, expected x, y"),
        ({"x": X[:, :1], "y": Y}, r"array 'x' is float32\[1\], expected float32\[2\] as before"),
        ({"x": X.astype("f8"), "y": Y}, r"array 'x' is float64\[2\], expected float32\[2\]"),
        ({"x": X, "y": Y[:-1]}, "its arrays differ in length: x has 500, y has 499"),
        ({"x": [[1], [2, 3]], "y": Y[:2]}, r"if its samples differ in length, declare it: variable=\('x',\)"),
        ({"x": X[:0], "y": Y[:0]}, r"array 'x' has shape \(0, 2\)"),
        ({"x y": X}, "array 'x y' is no plain name"),
        ({"x": ["a"], "y": Y[:1]}, "dtype <U1, which no tensor holds"),
        ({}, "holds no arrays"),
        ([X], "is list, expected a dict"),
    ],
)
def test_a_batch_unlike_the_first_is_refused_and_may_be_left_out(tmp_path, batch, message):
    with mt.ShardWriter(tmp_path) as writer:
        writer.add({"x": X, "y": Y})
        with pytest.raises(DataError, match=message) as caught:
            writer.add(batch)
        assert f"{tmp_path}, batch from sample 500 on" in str(caught.value)
        writer.add({"x": X, "y": Y})
    assert in_order(tmp_path)["y"].tolist() == [*range(500), *range(500)]


def test_misuse_is_said(tmp_path):
    with pytest.raises(UsageError, match="as a context manager"):
        mt.ShardWriter(tmp_path).add({"x": X})
    with pytest.raises(UsageError, match="no samples were added"), mt.ShardWriter(tmp_path):
        pass
    with pytest.raises(UsageError, match="split 'a b' is no plain name"), mt.ShardWriter(tmp_path) as writer:
        writer.add({"x": X}, split="a b")
    with (
        pytest.raises(UsageError, match="'z' is none of the arrays x"),
        mt.ShardWriter(tmp_path, variable=("z",)) as writer,
    ):
        writer.add({"x": X})
    with pytest.raises(UsageError, match="chunk_samples must be at least 1, got 0"):
        mt.ShardWriter(tmp_path, chunk_samples=0)
    assert names(tmp_path) == []
