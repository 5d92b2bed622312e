"""Packing: the same samples every time, whole or not at all, and only once."""

import functools
import hashlib
import inspect
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import Shards
from mpitrain.data.format.manifest import NAME, Manifest
from mpitrain.data.sources.base import ArraySource
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.atomic import replacing
from tests.data.mortal import die_at, no_power_cut, on_ranks  # noqa: F401

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


@settings(max_examples=25)
@given(
    st.integers(2, 60),
    st.floats(0, 0.99),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 5),
)
def test_the_split_is_a_partition_and_the_number_of_ranks_changes_no_byte(
    tmp_path_factory, num_samples, validate, shard, chunk, seed, size
):
    one, many = (tmp_path_factory.mktemp(name) for name in ("one", "many"))
    arrays, options = {"y": np.arange(num_samples)}, PackOptions(validate, shard, chunk, seed)
    manifest, _ = pack(arrays, one, options)
    files = {name: part["y"] for name, part in contents(one).items()}
    assert sorted(np.concatenate(list(files.values())).tolist()) == list(range(num_samples))
    held_out = sum(len(rows) for name, rows in files.items() if name.startswith("validate"))
    assert held_out == min(round(num_samples * validate), num_samples - 1)
    assert all(1 <= len(rows) <= shard for rows in files.values())
    assert manifest.files == {name: len(rows) for name, rows in files.items()}
    told = on_ranks(size, lambda ranks: pack(arrays, many, options, ranks=ranks))
    assert sums(many) == sums(one) and told == [(manifest, True)] * size


def test_ranks_go_on_with_what_one_left_and_agree_that_nothing_is_to_do(tmp_path, whole):
    with pytest.raises(KeyboardInterrupt):
        pack(Broken(6), tmp_path, OPTIONS)
    before = (tmp_path / FILES[3]).stat().st_mtime_ns
    for written in (True, False):
        told = on_ranks(3, lambda ranks: pack(ARRAYS, tmp_path, OPTIONS, source="test", ranks=ranks))
        assert [each[1] for each in told] == [written] * 3
        assert sums(tmp_path) == whole and (tmp_path / FILES[3]).stat().st_mtime_ns == before
    with pytest.raises(UsageError, match=r"holds another pack \(seed=0\)"):
        on_ranks(
            3, lambda ranks: pack(ARRAYS, tmp_path, PackOptions(0.25, 300, 64, 1), source="test", ranks=ranks)
        )


@pytest.mark.parametrize("size", [1, 3])
def test_an_iterable_is_packed_in_its_order_and_by_many_ranks_alike(tmp_path, size):
    def samples():
        yield from ({"y": i, "x": np.full(3, i, np.float32)} for i in range(1000))

    pack(samples(), tmp_path / "one", validate=0.1, shard_samples=150, chunk_samples=16)
    if size > 1:
        options = {"validate": 0.1, "shard_samples": 150, "chunk_samples": 16}
        on_ranks(size, lambda ranks: pack(samples(), tmp_path / "many", ranks=ranks, **options))
        assert sums(tmp_path / "many") == sums(tmp_path / "one")
    parts = {name: part["y"] for name, part in contents(tmp_path / "one").items()}
    train, validate = (
        np.concatenate([rows for name, rows in parts.items() if name.startswith(split)])
        for split in ("train", "validate")
    )
    assert (np.diff(train) > 0).all() and (np.diff(validate) > 0).all()
    assert sorted([*train, *validate]) == list(range(1000)) and 60 < len(validate) < 140
    with pytest.raises(UsageError, match="holds a finished pack"):
        pack(samples(), tmp_path / "one")


@pytest.mark.parametrize("settings", [{"compression": "gzip"}, {}])
def test_compression_is_part_of_the_recipe_and_changes_no_sample(tmp_path, whole, settings):
    pack(ARRAYS, tmp_path, PackOptions(0.25, 300, 64, **settings), source="test")
    assert (sums(tmp_path) == whole) == (not settings)
    for part in contents(tmp_path).values():
        assert np.array_equal(part["x"], ARRAYS["x"][part["y"]])


def test_shards_hold_every_sample_with_its_label(tmp_path):
    manifest, written = pack(ARRAYS, tmp_path, OPTIONS, source="test")
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
        pack(ARRAYS, tmp_path / name, PackOptions(0.25, 300, 64, seed), source="test")
    read = {name: (tmp_path / name / FILES[0]).read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


def test_packing_again_does_nothing(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, source="test")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    _, written = pack(dict(reversed(ARRAYS.items())), tmp_path, OPTIONS, source="test")
    assert not written
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 5000)])
def test_a_pack_that_lost_something_is_done_again(tmp_path, damage):
    pack(ARRAYS, tmp_path, OPTIONS, source="test")
    whole = contents(tmp_path)
    damage(tmp_path / FILES[1])
    _, written = pack(ARRAYS, tmp_path, OPTIONS, source="test")
    assert written
    assert str(contents(tmp_path)) == str(whole)


def test_the_manifest_holds_every_shards_sum_and_a_changed_shard_is_packed_again(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, source="test")
    expected = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in FILES}
    assert Manifest.read(tmp_path).sha256 == expected
    with h5py.File(tmp_path / FILES[0], "r+") as file:  # a valid shard of the right size, with another label
        file["y"][0] += 1
    assert pack(ARRAYS, tmp_path, OPTIONS, source="test")[1]
    assert hashlib.sha256((tmp_path / FILES[0]).read_bytes()).hexdigest() == expected[FILES[0]]


def test_a_missing_shard_of_a_pack_is_noticed_before_training(tmp_path):
    pack(ARRAYS, tmp_path, OPTIONS, source="test")
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(DataError, match=rf"{FILES[1]}: shard is missing \(1 of 3 that {NAME} lists"):
        Shards(f"{tmp_path}/train-*.h5").scan()
    assert Shards(f"{tmp_path}/validate-*.h5").scan().num_samples == 250


def sums(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names(directory)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("whole")
    pack(ARRAYS, directory, OPTIONS, source="test")
    return sums(directory)


@pytest.mark.parametrize(
    "options", [OPTIONS, pytest.param(PackOptions(0.5, 500, 10), marks=pytest.mark.extended)]
)
def test_killed_at_any_moment_it_is_refused_by_jobs_and_gone_on_with(tmp_path, whole, options):
    """Whole shards stay as they are; only what is missing is written, and nothing is left beside the pack. With other
    options it begins anew."""
    moment, interrupted, kept = 1, 0, 0
    while die_at(
        moment, functools.partial(pack, ARRAYS, directory := tmp_path / str(moment), OPTIONS, source="test")
    ):
        try:
            Shards(f"{directory}/*.h5").scan()
            assert {name: sums(directory)[name] for name in whole} == whole
        except DataError as error:
            interrupted += "pack was interrupted half-way; run `mpitrain data pack` once more" in str(error)
            before = {path.name: path.stat().st_mtime_ns for path in directory.glob("*.h5")}
            receipts = [name for name in names(directory) if name.endswith(".done")]
            manifest, written = pack(ARRAYS, directory, options, source="test")
            assert written and names(directory) == [NAME, *sorted(manifest.files)]
            if options == OPTIONS:
                assert sums(directory) == whole
                for receipt in receipts:
                    name = receipt[1 : -len(".done")]
                    kept += before[name] == (directory / name).stat().st_mtime_ns
        moment += 7 if options != OPTIONS else 3
    assert interrupted > 5 and (kept > 5 or options != OPTIONS)


def test_a_shard_that_changed_while_the_pack_was_interrupted_is_written_again(tmp_path, whole):
    moment = 1
    while die_at(
        moment, functools.partial(pack, ARRAYS, directory := tmp_path / str(moment), OPTIONS, source="test")
    ):
        if (directory / f".{FILES[0]}.done").exists():
            break
        moment += 1
    with open(directory / FILES[0], "r+b") as file:
        file.seek(5000)
        file.write(b"!")
    assert pack(ARRAYS, directory, OPTIONS, source="test")[1] and sums(directory) == whole


def looks_before() -> bool:
    return any(frame.function == "look_at_columns" for frame in inspect.stack(0))


class Broken(ArraySource):
    """A source whose disk goes at the n-th read of a chunk; samples that are looked at before are none."""

    def __init__(self, good_reads: int):
        super().__init__(ARRAYS, "test")
        self.good_reads = good_reads

    def read(self, start: int, count: int) -> dict[str, np.ndarray]:
        self.good_reads -= not looks_before()
        if self.good_reads < 0:
            raise KeyboardInterrupt
        return super().read(start, count)


def test_an_interrupt_before_the_first_shard_is_whole_leaves_nothing_and_later_all_that_is_whole(
    tmp_path, whole
):
    with pytest.raises(KeyboardInterrupt):
        pack(Broken(4), tmp_path, OPTIONS)
    assert names(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        pack(Broken(6), tmp_path, OPTIONS)
    assert names(tmp_path) == [f".{FILES[3]}.done", NAME, FILES[3]]
    assert pack(ARRAYS, tmp_path, OPTIONS, source="test")[1] and sums(tmp_path) == whole


@pytest.mark.parametrize("limit", [0, 100, 600, 3000, 20_000, 60_000, 77_000, 84_000])
def test_a_full_disk_leaves_nothing_and_holds_nothing(tmp_path, limit):
    """The file size limit fails writes as a full disk does (Python ignores SIGXFSZ, so writes say EFBIG)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(DataError) as caught:
            pack(ARRAYS, tmp_path, OPTIONS, source="test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert str(tmp_path) in str(caught.value) and "disk is full" in str(caught.value)
    assert "Free space" in str(caught.value)
    if limit < 70_000:
        assert names(tmp_path) == []
    else:  # the first shard found room
        assert "1 of 4 shards are whole and stay: the same command goes on" in str(caught.value)
        assert names(tmp_path) == [f".{FILES[3]}.done", NAME, FILES[3]]
    held = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
    assert not [target for target in held if str(tmp_path) in target]
    assert pack(ARRAYS, tmp_path, OPTIONS, source="test")[1]
    assert names(tmp_path) == [NAME, *FILES]


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
    pack(ARRAYS, tmp_path / "a", OPTIONS, source="test")
    before = str(contents(tmp_path / "a"))
    with pytest.raises(UsageError, match=r"holds another pack \(seed=0\); choose another"):
        pack(ARRAYS, tmp_path / "a", PackOptions(0.25, 300, 64, seed=1), source="test")
    with pytest.raises(UsageError, match="holds another pack"):
        pack({"x": ARRAYS["x"] + 1, "y": ARRAYS["y"]}, tmp_path / "a", OPTIONS, source="test")
    assert str(contents(tmp_path / "a")) == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train-00000.h5").write_text("mine")
    with pytest.raises(UsageError, match=r"holds train-00000\.h5, which no pack wrote"):
        pack(ARRAYS, tmp_path / "b", OPTIONS, source="test")
    assert names(tmp_path / "b") == ["train-00000.h5"]
    (tmp_path / "c").write_text("a file")
    with pytest.raises(UsageError, match="cannot be made a directory"):
        pack(ARRAYS, tmp_path / "c", OPTIONS, source="test")


@pytest.mark.parametrize("text", ["[]", "{", '{"files": {}}', '{"else": 1}'])
def test_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DataError, match="is not a manifest of `mpitrain data pack`"):
        Manifest.read(tmp_path)


def test_chunks_and_shards_have_sensible_sizes_unless_told(tmp_path):
    arrays = {"x": np.zeros((4000, 1024), np.float32)}
    pack(arrays, tmp_path, PackOptions(validate=0), source="test")
    (info,) = Shards(f"{tmp_path}/*.h5").scan().files
    assert info.chunk_samples == 256  # 1 MiB
    with pytest.raises(UsageError, match="HDF5 chunks end at 4 GiB"):
        pack(arrays, tmp_path / "b", PackOptions(shard_samples=1 << 21, chunk_samples=1 << 20), source="test")


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
