"""`data check` finds each fault and names its place; `data info` tells what is stored and how."""

import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.cli.main import main
from mpitrain.data.format.manifest import Manifest
from mpitrain.data.tools.check import check
from mpitrain.data.write.pack import pack
from mpitrain.data.write.shard_file import write_shard
from mpitrain.errors import DataError
from tests.data.mortal import no_power_cut, on_ranks  # noqa: F401

X, Y = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32), np.arange(1000)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    pack({"x": X, "y": Y}, directory, validate=0, shard_samples=300, chunk_samples=64)
    return directory


@pytest.fixture
def copy(packed, tmp_path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def problems(target: object) -> tuple[str, ...]:
    return check(str(target)).problems


def test_a_whole_pack_has_no_problems_alone_and_by_ranks(packed):
    found = check(str(packed))
    assert (found.indexed, found.num_shards, found.num_samples, found.problems) == (True, 4, 1000, ())
    assert on_ranks(3, lambda ranks: check(str(packed), None, ranks)) == [found] * 3


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(2).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 9] ^= 1
    path.write_bytes(content)


def change(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["y"][0] += 1


def reshape(path: Path) -> None:
    write_shard(path, {"x": X[:300, :8], "y": Y[:300]}, np.arange(300), 64)


def later_schema(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["mpitrain_schema"] = 9


CHANGED = "its SHA-256 is not the one that mpitrain-pack.json keeps: it has changed since it was packed"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (truncate, [CHANGED, "is truncated"]),
        (flip, [CHANGED, "dataset 'x', chunk 2 (samples 128 to 191) fails its fletcher32 checksum"]),
        (Path.unlink, ["shard is missing"]),
        (change, [CHANGED]),
        (reshape, [CHANGED, "has the arrays x float32[8], y int64[], which are not those that"]),
        (later_schema, [CHANGED, "has shard schema 9"]),
    ],
)
def test_each_fault_names_its_place_and_the_other_shards_are_fine(copy, fault, told):
    path = copy / "train-00001.h5"
    fault(path)
    found = problems(copy)
    assert len(found) == len(told)
    for problem, words in zip(found, told):
        assert problem.startswith(f"{path}: ") and words in problem
    assert on_ranks(2, lambda ranks: check(str(copy), None, ranks).problems) == [found] * 2


def test_a_value_that_is_not_finite_is_named_to_the_sample(tmp_path):
    x = X.copy()
    x[70, 3], x[71, 0], x[800, 5] = np.nan, np.inf, -np.inf
    write_shard(tmp_path / "a.h5", {"x": x, "y": Y}, np.arange(1000), 64)
    found = problems(tmp_path / "*.h5")
    assert found == (
        f"{tmp_path}/a.h5: dataset 'x', chunk 1, sample 70 holds nan",
        f"{tmp_path}/a.h5: dataset 'x', chunk 12, sample 800 holds -inf",
    )
    write_shard(tmp_path / "a.h5", {"x": np.full((500, 1), np.nan)}, np.arange(500), 1)
    found = problems(tmp_path / "*.h5")
    assert len(found) == 21 and "more may be wrong; stopped after 20 problems" in found[-1]


def test_files_that_disagree_and_what_is_no_pack(tmp_path, copy):
    write_shard(tmp_path / "a.h5", {"x": X}, np.arange(1000), 64)
    write_shard(tmp_path / "b.h5", {"x": X[:, :3]}, np.arange(1000), 64)
    assert problems(tmp_path / "*.h5") == (
        f"{tmp_path}/b.h5: has the arrays x float32[3], {tmp_path}/a.h5 has x float32[16]",
    )
    with pytest.raises(DataError, match="no such folder or file"):
        check(str(tmp_path / "*.none"))
    with pytest.raises(DataError, match="no pack; make one with"):
        check(str(tmp_path))
    Manifest(**{**vars(Manifest.read(copy)), "complete": False}).write(copy)
    with pytest.raises(DataError, match="an unfinished pack"):
        check(str(copy))


def advice(tmp_path: Path, num_workers: int | None = None, **datasets: dict) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in datasets.items():
            file.create_dataset(name, **options)
    return "\n".join(check(f"{tmp_path}/*.h5", num_workers).advice)


def test_advice_says_what_makes_reading_slow(tmp_path):
    data = np.zeros((4096, 256), np.float32)
    assert advice(tmp_path, x={"data": data, "chunks": (1024, 256)}) == ""
    assert "dataset 'x' is not chunked" in advice(tmp_path, x={"data": data})
    assert "has chunks (1024, 16), which cut its samples (256,)" in advice(
        tmp_path, x={"data": data, "chunks": (1024, 16)}
    )
    assert "do not line up" in advice(
        tmp_path, x={"data": data, "chunks": (1024, 256)}, y={"data": data[:, 0], "chunks": (1000,)}
    )
    many = advice(tmp_path, 2, x={"data": data, "chunks": (1024, 256)})
    assert "4 chunks are fewer than 16 = 2 workers x 8 chunks a window" in many
    assert "4096 samples are fewer than 5000 workers" in advice(
        tmp_path, 5000, x={"data": data, "chunks": True}
    )
    write_shard(tmp_path / "a.h5", {"x": data}, np.arange(4096), 16)
    assert "chunks of 16.0 KiB cost more than their bytes; between 256 KiB and 16 MiB is good" in "".join(
        check(f"{tmp_path}/a.h5").advice
    )
    write_shard(tmp_path / "a.h5", {"x": np.zeros((17, 1 << 18), np.float32)}, np.arange(17), 17)
    assert "chunks of 17.0 MiB make windows large" in "".join(check(f"{tmp_path}/a.h5").advice)


def test_check_and_info_on_the_command_line(copy, tmp_path, capsys):
    assert main(["data", "check", str(copy), "--workers", "4"]) == 0
    out = capsys.readouterr().out
    assert "advice: 17 chunks are fewer than 32" in out
    assert "4 shards, 1000 samples: every shard is what was packed, every value is finite" in out
    flip(copy / "train-00002.h5")
    assert main(["data", "check", str(copy)]) == 2
    assert "train-00002.h5: dataset 'x', chunk 2" in capsys.readouterr().err
    pack({"x": X, "y": Y}, tmp_path / "gzip", validate=0, compression="gzip:5")
    assert main(["data", "info", f"{tmp_path}/gzip/*.h5"]) == 0
    out = capsys.readouterr().out
    assert "array x: float32[16], 64 bytes a sample (shuffle, gzip:5, fletcher32)" in out
    assert "1000 samples, 0.1 MiB decoded, 0.1 MiB on disk" in out
    assert main(["data", "info", f"{tmp_path}/gzip"]) == 0 and capsys.readouterr().out == out
    assert "compression gzip:5" in out and "source Python" in out and "seed 0" in out
