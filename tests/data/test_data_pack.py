"""Packing: the same samples every time, whole or not at all, and only once."""

import hashlib
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpitrain.data.pack
from mpitrain.data import Shards
from mpitrain.data.atomic import replacing
from mpitrain.data.manifest import NAME, Manifest
from mpitrain.data.pack import PackOptions, pack
from mpitrain.data.write import write_shard
from mpitrain.errors import DataError, UsageError

ARRAYS = {"y": np.arange(1000), "x": np.arange(64000, dtype=np.float32).reshape(1000, 8, 8)}
OPTIONS = PackOptions(validate=0.25, shard_samples=300, chunk_samples=64)
FILES = ["train-00000.h5", "train-00001.h5", "train-00002.h5", "validate-00000.h5"]


def contents(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for path in sorted(directory.glob("*.h5")):
        with h5py.File(path) as file:
            found[path.name] = {name: file[name][()] for name in file}
    return found


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@given(st.integers(2, 500), st.floats(0, 0.99), st.integers(1, 200), st.integers(0, 9))
def test_the_split_is_a_partition(num_samples, validate, shard, seed):
    files = mpitrain.data.pack._split(num_samples, PackOptions(validate, shard, 10, seed))
    assert sorted(np.concatenate(list(files.values())).tolist()) == list(range(num_samples))
    held_out = sum(len(rows) for name, rows in files.items() if name.startswith("validate"))
    assert held_out == min(round(num_samples * validate), num_samples - 1)
    assert all(1 <= len(rows) <= shard for rows in files.values())


def test_shards_hold_every_sample_with_its_label(tmp_path):
    manifest, written = pack(ARRAYS, tmp_path, OPTIONS, "test")
    assert written and manifest.complete and names(tmp_path) == [NAME, *FILES]
    for part in contents(tmp_path).values():
        assert part["x"].dtype == np.float32 and part["y"].dtype == np.int64
        assert np.array_equal(part["x"], ARRAYS["x"][part["y"]])
    catalogue = Shards(f"{tmp_path}/*.h5").scan()
    assert catalogue.num_samples == 1000
    assert [file.chunk_samples for file in catalogue.files] == [64] * 4
    with h5py.File(tmp_path / FILES[0]) as file:
        assert file["x"].fletcher32 and file["y"].fletcher32


def test_packs_are_equal_for_equal_seeds_only(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        pack(ARRAYS, tmp_path / name, PackOptions(0.25, 300, 64, seed), "test")
    read = {name: (tmp_path / name / FILES[0]).read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


def test_packing_again_does_nothing(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, "test")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    _, written = pack(dict(reversed(ARRAYS.items())), tmp_path, OPTIONS, "test")
    assert not written
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 5000)])
def test_a_pack_that_lost_something_is_done_again(tmp_path, damage):
    pack(ARRAYS, tmp_path, OPTIONS, "test")
    whole = contents(tmp_path)
    damage(tmp_path / FILES[1])
    _, written = pack(ARRAYS, tmp_path, OPTIONS, "test")
    assert written
    assert str(contents(tmp_path)) == str(whole)


def test_the_manifest_holds_every_shards_sum_and_a_changed_shard_is_packed_again(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, "test")
    sums = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in FILES}
    assert Manifest.read(tmp_path).sha256 == sums
    with h5py.File(tmp_path / FILES[0], "r+") as file:  # a valid shard of the right size, with another label
        file["y"][0] += 1
    assert pack(ARRAYS, tmp_path, OPTIONS, "test")[1]
    assert hashlib.sha256((tmp_path / FILES[0]).read_bytes()).hexdigest() == sums[FILES[0]]


def test_a_missing_shard_of_a_pack_is_noticed_before_training(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, "test")
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(DataError, match=rf"{FILES[1]}: shard is missing \(1 of 3 that {NAME} lists"):
        Shards(f"{tmp_path}/train-*.h5").scan()
    assert Shards(f"{tmp_path}/validate-*.h5").scan().num_samples == 250


def killed_pack(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a SIGKILL in the middle of the second shard leaves."""

    def write_or_die(path, *rest):
        if path.name != FILES[3]:
            (path.with_name(f".{path.name}.partial")).write_bytes(b"half")
            raise KeyboardInterrupt
        write_shard(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(mpitrain.data.pack, "write_shard", write_or_die)
        patch.setattr(Manifest, "remove", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            pack(ARRAYS, directory, OPTIONS, "test")


@pytest.mark.parametrize("options", [OPTIONS, PackOptions(0.5, 500, 10)])
def test_an_interrupted_pack_is_refused_by_jobs_and_done_again(tmp_path, monkeypatch, options):
    killed_pack(tmp_path, monkeypatch)
    assert names(tmp_path) == [f".{FILES[0]}.partial", NAME, FILES[3]]
    for pattern in ("train-*.h5", "validate-*.h5"):
        with pytest.raises(
            DataError, match="pack was interrupted half-way; run `mpitrain data pack` once more"
        ):
            Shards(f"{tmp_path}/{pattern}").scan()
    manifest, written = pack(ARRAYS, tmp_path, options, "test")
    assert written and names(tmp_path) == [NAME, *sorted(manifest.files)]
    assert Shards(f"{tmp_path}/*.h5").scan().num_samples == 1000


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mpitrain.data.pack, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(ARRAYS, tmp_path, OPTIONS, "test")
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", [0, 100, 600, 3000, 20_000, 60_000, 77_000, 90_000])
def test_a_full_disk_leaves_nothing_and_holds_nothing(tmp_path, limit):
    """The file size limit fails writes as a full disk does (Python ignores SIGXFSZ, so writes say EFBIG)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(DataError) as caught:
            pack(ARRAYS, tmp_path, OPTIONS, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert str(tmp_path) in str(caught.value) and "disk is full" in str(caught.value)
    assert "Free space" in str(caught.value)
    assert names(tmp_path) == []
    held = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
    assert not [target for target in held if str(tmp_path) in target]
    assert pack(ARRAYS, tmp_path, OPTIONS, "test")[1]


def test_a_failed_replacement_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert names(tmp_path) == ["a.txt"] and path.read_text() == "old"
    with replacing(path) as file:
        file.write(b"new")
    assert names(tmp_path) == ["a.txt"] and path.read_text() == "new"
    with (
        pytest.raises(DataError, match=r"gone/a\.txt: cannot be written \(No such file"),
        replacing(tmp_path / "gone" / "a.txt"),
    ):
        pass


def test_another_pack_and_foreign_shards_are_left_alone(tmp_path):
    pack(ARRAYS, tmp_path / "a", OPTIONS, "test")
    before = str(contents(tmp_path / "a"))
    with pytest.raises(UsageError, match=r"holds another pack \(seed=0\); choose another"):
        pack(ARRAYS, tmp_path / "a", PackOptions(0.25, 300, 64, seed=1), "test")
    with pytest.raises(UsageError, match="holds another pack"):
        pack({"x": ARRAYS["x"] + 1, "y": ARRAYS["y"]}, tmp_path / "a", OPTIONS, "test")
    assert str(contents(tmp_path / "a")) == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train-00000.h5").write_text("mine")
    with pytest.raises(UsageError, match=r"holds train-00000\.h5, which no pack wrote"):
        pack(ARRAYS, tmp_path / "b", OPTIONS, "test")
    assert names(tmp_path / "b") == ["train-00000.h5"]
    (tmp_path / "c").write_text("a file")
    with pytest.raises(UsageError, match="cannot be made a directory"):
        pack(ARRAYS, tmp_path / "c", OPTIONS, "test")


@pytest.mark.parametrize("text", ["[]", "{", '{"files": {}}', '{"else": 1}'])
def test_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DataError, match="is not a manifest of `mpitrain data pack`"):
        Manifest.read(tmp_path)


def test_chunks_and_shards_have_sensible_sizes_unless_told(tmp_path):
    arrays = {"x": np.zeros((4000, 1024), np.float32)}
    pack(arrays, tmp_path, PackOptions(validate=0), "test")
    (info,) = Shards(f"{tmp_path}/*.h5").scan().files
    assert info.chunk_samples == 256  # 1 MiB
    with pytest.raises(UsageError, match="HDF5 chunks end at 4 GiB"):
        pack(arrays, tmp_path / "b", PackOptions(shard_samples=1 << 21, chunk_samples=1 << 20), "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validate": 1.0}, r"--validate must be in \[0, 1\), got 1.0"),
        ({"shard_samples": 0}, "--shard-samples must be at least 1, got 0"),
        ({"chunk_samples": -1}, "--chunk-samples must be at least 1, got -1"),
        ({"seed": -1}, "--seed must not be negative, got -1"),
    ],
)
def test_options_are_checked(change, message):
    with pytest.raises(UsageError, match=message):
        PackOptions(**change)
