"""What can be wrong with shards: each error names the file and the way out."""

import contextlib
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.data import Shards
from mpitrain.data.format.layout import (
    CHUNK_ATTRIBUTE,
    ENTRIES_ATTRIBUTE,
    SCHEMA_ATTRIBUTE,
    cache_bytes_needed,
)
from mpitrain.data.read import shards
from mpitrain.data.tools.check import check
from mpitrain.data.write.pack import pack
from mpitrain.data.write.shard_file import write_shard
from mpitrain.errors import DataError, UsageError

X, Y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12)


def good(path: Path, chunk: int = 4) -> Path:
    write_shard(path, {"x": X, "y": Y}, np.arange(12), chunk)
    return path


def foreign(path: Path, **arrays: object) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def refused(pattern: object, *parts: str) -> str:
    """Scanning raises a DataError whose message holds all parts."""
    with pytest.raises(DataError) as caught:
        Shards(str(pattern)).scan()
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def test_no_shard_matches_says_where_we_looked_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack = "make some with `mpitrain data pack SOURCE DIRECTORY`"
    refused(
        "data/train-*.h5",
        "no shard matches 'data/train-*.h5'",
        f"{tmp_path}/data, which does not exist",
        pack,
    )
    (tmp_path / "data").mkdir()
    refused("data/train-*.h5", "which holds nothing", pack)
    good(tmp_path / "data" / "test-0.h5")
    refused("data/train-*.h5", "which holds test-0.h5", pack)
    refused("data/*/train-*.h5", f"looked in {tmp_path}/data", pack)


def test_a_truncated_shard(tmp_path):
    path = good(tmp_path / "a.h5")
    for size in (path.stat().st_size - 1, 1000):
        os.truncate(path, size)
        refused(path, str(path), f"is truncated ({size} bytes are there", "pack it again")


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all" * 100])
def test_a_file_that_is_not_hdf5(tmp_path, content):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    refused(path, str(path), "is not an HDF5 file", "matches shards only")


def test_a_damaged_structure(tmp_path):
    """Wherever a block is overwritten, the error is ours and names the file; never a raw h5py error."""
    whole = good(tmp_path / "a.h5").read_bytes()
    errors = 0
    for offset in range(0, len(whole), 64):
        path = tmp_path / "b.h5"
        path.write_bytes(whole[:offset] + b"\xa5" * 64 + whole[offset + 64 :])
        source = Shards(str(path))
        try:
            with source.reader(source.scan(), 0) as reader:
                reader.batch(0, 0, 12)
        except DataError as error:
            errors += 1
            assert str(path) in str(error)
    assert errors > 5


def test_links_that_lead_nowhere_and_directories(tmp_path):
    (tmp_path / "a.h5").symlink_to("gone")
    refused(tmp_path / "*.h5", f"{tmp_path}/a.h5", "leads nowhere")
    (tmp_path / "a.h5").unlink()
    (tmp_path / "a.h5").mkdir()
    refused(tmp_path / "*.h5", f"{tmp_path}/a.h5", "is a directory")


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may read everything, so step down for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """pytest's own temporary directories are closed to other users."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def test_an_unreadable_shard(open_directory):
    path = good(open_directory / "a.h5")
    path.chmod(0)
    with as_ordinary_user():
        refused(path, str(path), "may not be read by this user", "change its permissions")


def test_an_unreadable_directory(open_directory):
    good(open_directory / "a.h5")
    open_directory.chmod(0)
    with as_ordinary_user():
        refused(open_directory / "*.h5", str(open_directory), "Permission denied", "change its permissions")


def test_arrays_of_different_lengths(tmp_path):
    path = foreign(tmp_path / "a.h5", x=X, y=Y[:-1])
    refused(path, str(path), "x has 12, y has 11", "one entry per sample")


def test_an_empty_shard(tmp_path):
    good(tmp_path / "a.h5")
    path = foreign(tmp_path / "b.h5", x=X[:0], y=Y[:0])
    refused(tmp_path / "*.h5", str(path), "is empty (0 samples in x, y)", "remove the file")


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"x": X, "z": Y}, ["has the datasets x, z, expected x, y"]),
        ({"x": X}, ["has the datasets x, expected x, y"]),
        ({"x": X[:, :1], "y": Y}, ["dataset 'x' differs in shape", "found float32[1], expected float32[2]"]),
        (
            {"x": X.astype("f8"), "y": Y},
            ["dataset 'x' differs in dtype", "found float64[2], expected float32[2]"],
        ),
    ],
)
def test_shards_that_disagree(tmp_path, arrays, parts):
    first = good(tmp_path / "a.h5")
    path = foreign(tmp_path / "b.h5", **arrays)
    refused(tmp_path / "*.h5", str(path), str(first), "all shards of a source hold the same arrays", *parts)


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (
            {"x": X, "names": np.array([b"a"] * 12)},
            ["dataset 'names'", "which no tensor can hold", "arrays=("],
        ),
        ({"x": X, "names": ["a"] * 12}, ["dataset 'names'", "text or objects", "which no tensor can hold"]),
        ({"x": X, "scale": 2.0}, ["dataset 'scale' is a single value", "expected shape (samples, ...)"]),
        ({"x": X[:, :0]}, ["dataset 'x' is of shape (12, 0)"]),
        ({"g/x": X}, ["has no datasets at its root (found groups g)"]),
        ({}, ["has no datasets at its root (found nothing)"]),
    ],
)
def test_arrays_that_are_no_samples(tmp_path, arrays, parts):
    path = foreign(tmp_path / "a.h5", **arrays)
    refused(path, str(path), *parts)


def test_chunks_that_do_not_line_up_with_the_runs_get_a_chunk_cache(tmp_path):
    """Otherwise HDF5 would decode them once per run; where they line up the cache would be a second copy."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (100, 3), "f4", chunks=(10, 3))
        y = file.create_dataset("y", (100,), "i8", chunks=(7,))
        assert cache_bytes_needed({"x": x}, 20) == 0
        assert cache_bytes_needed({"x": x}, 15) == 2 * 10 * 3 * 4
        assert cache_bytes_needed({"x": x, "y": y}, 20) == 2 * 7 * 8
    source = Shards(str(path))
    with source.reader(source.scan(), 0) as reader:
        assert len(reader.batch(0, 0, 100)["y"]) == 100


def test_named_arrays_leave_the_others_alone(tmp_path):
    path = foreign(tmp_path / "a.h5", x=X, y=Y, scale=2.0)
    assert list(Shards(str(path), arrays=("y",)).scan().arrays) == ["y"]
    with pytest.raises(DataError, match="has no dataset 'z'; it has scale, x, y"):
        Shards(str(path), arrays=("z",)).scan()


def test_a_shard_of_a_later_schema(tmp_path):
    path = good(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file.attrs["mpitrain_schema"] = 3
    refused(path, str(path), "has shard schema 3, this mpitrain reads up to 2")


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_flipped_bit_is_found_and_located(tmp_path, prefetch):
    path = good(tmp_path / "a.h5")
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(1).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 5] ^= 1
    path.write_bytes(content)
    source = Shards(str(path), window_chunks=1)
    catalogue = source.scan()
    with source.reader(catalogue, 0) as reader:
        bad = reader.order.epoch(0)._chunks.tolist().index(1)  # windows of one chunk: which comes second
        for window in range(3):
            if prefetch:
                reader.prefetch(0, 4 * window, 4)
            if window != bad:
                assert len(reader.batch(0, 4 * window, 4)["y"]) == 4
                continue
            with pytest.raises(DataError) as caught:
                reader.batch(0, 4 * window, 4)
            assert f"{path}: dataset 'x', chunk 1 (samples 4 to 7) fails its fletcher32" in str(caught.value)
            assert "pack it again" in str(caught.value)


def test_200_random_damages_of_a_shard_are_all_seen(tmp_path):
    """By training as by the check: every byte of a shard is under a checksum, HDF5's own tables included."""
    draw = random.Random(7)
    pack({"x": X, "y": Y}, tmp_path, validate=0, shard_samples=12, chunk_samples=4)
    (path,) = tmp_path.glob("*.h5")
    whole = path.read_bytes()
    for kind in ["empty"] + 49 * ["truncated"] + 150 * ["flipped"]:
        data = bytearray(whole)
        if kind == "flipped":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[0 if kind == "empty" else draw.randrange(len(data)) :]
        path.write_bytes(data)
        source = Shards(str(path))
        with (
            pytest.raises(DataError, match=re.escape(str(path))),
            source.reader(source.scan(), 0) as reader,
        ):
            reader.batch(0, 0, 12)
        assert check(str(tmp_path)).problems, kind


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch " + os.environ["BOMB"],))


def test_a_malicious_pickle_in_a_shard_runs_nothing(tmp_path, monkeypatch):
    """As any attribute that we read, as one that we do not, as a dataset, and as the index."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bomb = np.void(pickle.dumps(Bomb()))
    pack({"x": X, "y": Y}, tmp_path, validate=0, shard_samples=12, chunk_samples=4)
    (path,) = tmp_path.glob("*.h5")
    whole, index = path.read_bytes(), tmp_path / "mpitrain-pack.json"

    def read():
        with contextlib.suppress(DataError):
            check(str(tmp_path))
        with contextlib.suppress(DataError):
            source = Shards(str(path))
            with source.reader(source.scan(), 0) as reader:
                reader.batch(0, 0, 12)
        assert not (tmp_path / "exploded").exists()

    for place in (None, "x"):
        for name in (SCHEMA_ATTRIBUTE, CHUNK_ATTRIBUTE, ENTRIES_ATTRIBUTE, "anything"):
            path.write_bytes(whole)
            with h5py.File(path, "a") as file:
                (file[place] if place else file).attrs[name] = bomb
            read()
    with h5py.File(path, "a") as file:
        file["z"] = np.full(12, bomb)
    read()
    path.write_bytes(whole)
    index.write_bytes(pickle.dumps(Bomb()))
    read()


def test_a_shard_that_changed_after_the_scan(tmp_path):
    path = good(tmp_path / "a.h5")
    source = Shards(str(path))
    catalogue = source.scan()
    write_shard(path, {"x": X, "y": Y}, np.arange(11), 4)
    with (
        source.reader(catalogue, 0) as reader,
        pytest.raises(DataError, match="has changed since this run scanned"),
    ):
        reader.batch(0, 0, 4)
    path.unlink()
    with source.reader(catalogue, 0) as reader, pytest.raises(DataError, match=f"{path}: no such file"):
        reader.batch(0, 0, 4)


def test_a_window_below_one_is_refused():
    with pytest.raises(UsageError, match="window_chunks must be at least 1, got 0"):
        Shards("x", window_chunks=0)


def test_shards_come_in_the_order_of_their_names_and_round_trip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "c", "a"):
        good(tmp_path / f"{name}.h5")
    source = Shards("*.h5", window_chunks=3, arrays=("x",))
    assert [Path(file.path).name for file in source.scan().files] == ["a.h5", "b.h5", "c.h5"]
    assert eval(repr(source), {"Shards": Shards}) == source
    assert hash(source) == hash(Shards("*.h5", 3, ("x",)))


@pytest.fixture
def large_pack(tmp_path):
    """Ninety shards of two samples, more than are opened before the first step."""
    samples = {"x": np.arange(180, dtype=np.float32).reshape(180, 1)}
    pack(samples, tmp_path, chunk_samples=2, shard_samples=2, validate=0.0)
    assert len(list(tmp_path.glob("train-*.h5"))) == 90
    return tmp_path


def test_of_a_large_pack_only_some_shards_are_opened_before_the_first_step(large_pack, monkeypatch):
    """The catalogue is that of opening all of them."""
    source, opened = Shards(str(large_pack / "train-*.h5")), []
    describe = shards.describe_shard
    monkeypatch.setattr(
        shards, "describe_shard", lambda path, *rest: opened.append(path) or describe(path, *rest)
    )
    catalogue = source.scan()
    assert len(opened) == shards.NUM_OPENED and opened[-1].endswith("train-00089.h5")
    monkeypatch.setattr(shards, "NUM_OPENED", 1000)
    assert source.scan() == catalogue and len(opened) == 64 + 90


def test_a_shard_of_a_large_pack_that_is_not_what_the_index_says_is_refused_when_it_is_opened(large_pack):
    with h5py.File(large_pack / "train-00070.h5", "r+") as file:
        file.attrs["chunk_samples"] = 1
    source = Shards(str(large_pack / "train-*.h5"))
    catalogue = source.scan()
    with (
        source.reader(catalogue, 0) as reader,
        pytest.raises(
            DataError, match=r"train-00070.h5: has changed .* or is not what the index of its pack says"
        ),
    ):
        for start in range(0, 180, 20):
            reader.batch(0, start, 20)
