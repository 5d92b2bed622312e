"""What can be packed: every kind of source gives each of its samples once, whole and with its own label."""

import io
import os
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet, table

from mpitrain.cli.main import main
from mpitrain.data.format.columns import Columns, Ragged
from mpitrain.data.sources import SourceOptions, open_source
from mpitrain.data.sources import base as sources_base
from mpitrain.data.sources.python import as_source
from mpitrain.data.write.pack import pack
from mpitrain.errors import DataError, UsageError
from tests.data.mortal import no_power_cut  # noqa: F401

RANDOM = np.random.default_rng(7)


def everything(source: object, step: int = 7, seed: int = 3) -> Columns:
    """All samples of a source in its order, read a few at a time; variable arrays as lists."""
    source.shuffle(seed)
    parts = [
        source.read(first, min(step, source.num_samples - first))
        for first in range(0, source.num_samples, step)
    ]
    return {
        name: [sample for part in parts for sample in part[name].samples()]
        if isinstance(parts[0][name], Ragged)
        else np.concatenate([part[name] for part in parts])
        for name in parts[0]
    }


def opened(text: object, **options: object) -> Columns:
    return everything(open_source(str(text), SourceOptions(**options)))


# ---- arrays


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_and_npy_are_read_where_they_lie(tmp_path, save):
    x, y = RANDOM.normal(size=(50, 3)).astype(">f4"), np.asfortranarray(np.arange(100).reshape(50, 2))
    save(tmp_path / "a.npz", x=x, y=y)
    back = opened(tmp_path / "a.npz")
    assert np.array_equal(back["x"], x[back["y"][:, 0] // 2]) and sorted(back["y"][:, 1]) == list(
        range(1, 100, 2)
    )
    np.save(tmp_path / "a.npy", x)
    assert sorted(opened(tmp_path / "a.npy")["x"][:, 0]) == sorted(x[:, 0])
    np.save(tmp_path / "b.npy", y)
    assert set(opened(tmp_path / "[ab].npy")) == {"a", "b"}


def test_a_large_source_is_mixed_in_blocks_and_still_given_once(monkeypatch):
    for name, size in (("MIXED_BYTES", 1000), ("BLOCK_BYTES", 80), ("WINDOW_BYTES", 400)):
        monkeypatch.setattr(sources_base, name, size)
    order = everything(as_source({"y": np.arange(1003)}, "test"))["y"]
    assert sorted(order.tolist()) == list(range(1003)) and order.tolist() != list(range(1003))
    blocks = order[:50] // 10  # five blocks of ten to a window
    assert len(set(blocks.tolist())) == 5


# ---- images


def make_images(folder: Path, sizes: list[tuple[int, int]]) -> dict[int, np.ndarray]:
    pixels = {}
    for number, (height, width) in enumerate(sizes):
        (folder / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        pixels[number] = RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels[number][0, 0] = number
        Image.fromarray(pixels[number]).save(folder / f"class{number % 3}" / f"{number}.png")
    (folder / "class0" / "notes.txt").write_text("no image")
    return pixels


def test_images_are_decoded_with_their_class(tmp_path):
    pixels = make_images(tmp_path, [(5, 4)] * 10)
    source = open_source(str(tmp_path))
    back = everything(source, step=3)
    assert source.facts()["classes"] == ["class0", "class1", "class2"] and back["x"].shape == (10, 3, 5, 4)
    numbers = back["x"][:, 0, 0, 0]
    assert sorted(numbers) == list(range(10)) and np.array_equal(back["y"], numbers % 3)
    for number, image in zip(numbers, back["x"]):
        assert np.array_equal(image, pixels[number].transpose(2, 0, 1))


def test_images_of_several_sizes_are_scaled_or_kept_as_bytes(tmp_path):
    make_images(tmp_path, [(5, 4)] * 3 + [(8, 6)])
    with pytest.raises(
        DataError, match=r"3\.png: is 8 x 6 pixels, .*0\.png is 5 x 4; give --image-size.*--encoded"
    ):
        opened(tmp_path)
    assert opened(tmp_path, image_size=(3, 2))["x"].shape == (4, 3, 3, 2)
    back = opened(tmp_path, encoded=True)
    files = sorted(path.read_bytes() for path in tmp_path.rglob("*.png"))
    assert sorted(sample.tobytes() for sample in back["x"]) == files


def test_what_is_wrong_with_images_names_them(tmp_path):
    with pytest.raises(UsageError, match="holds no images; expected one subfolder per class"):
        opened(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a/bad\.jpg: cannot be decoded as an image"):
        opened(tmp_path)


# ---- tables

COLUMNS = {
    "a": np.arange(40),
    "b": np.arange(40) * 0.5,
    "flag": np.arange(40) % 2 == 0,
    "text": ["" if i == 3 else "ä" * (i % 5) + str(i) for i in range(40)],
}


def test_csv_columns_become_arrays(tmp_path):
    csv.write_csv(table(COLUMNS), tmp_path / "a.csv")
    back = opened(tmp_path / "a.csv")
    assert back["a"].dtype == np.int64 and back["b"].dtype == np.float64 and back["flag"].dtype == bool
    assert sorted(back["a"]) == list(range(40)) and np.array_equal(back["b"], back["a"] * 0.5)
    assert [bytes(text).decode() for text in back["text"]] == [COLUMNS["text"][i] for i in back["a"]]
    joined = opened(tmp_path / "a.csv", arrays="x=a+b,y=flag")
    assert joined["x"].shape == (40, 2) and joined["x"].dtype == np.float64 and joined["y"].dtype == bool
    assert np.array_equal(joined["x"][:, 0] % 2 == 0, joined["y"])
    rest = opened(tmp_path / "a.csv", arrays="x=*,y=a")
    assert rest["x"].shape == (40, 2) and np.array_equal(rest["x"][:, 0], rest["y"] * 0.5)
    with pytest.raises(UsageError, match="there is no 'c'; there are a, b, flag, text"):
        opened(tmp_path / "a.csv", arrays="x=c")


def test_parquet_row_groups_lists_and_dictionaries(tmp_path):
    lists = [list(range(i % 4)) for i in range(40)]
    pairs = np.arange(80, dtype=np.float32).reshape(40, 2)
    import pyarrow as pa

    extra = {
        "ids": pa.array(lists, pa.list_(pa.int32())),
        "pair": pa.FixedSizeListArray.from_arrays(pa.array(pairs.reshape(-1)), 2),
        "word": pa.array(["x", "yy"] * 20).dictionary_encode(),
    }
    for number, part in enumerate((slice(0, 25), slice(25, 40))):
        rows = table({**COLUMNS, **extra}).slice(part.start, part.stop - part.start)
        parquet.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=7)
    source = open_source(f"{tmp_path}/*.parquet")
    assert source.block_sizes.tolist() == [7, 7, 7, 4, 7, 7, 1]
    back = everything(source)
    assert sorted(back["a"]) == list(range(40)) and back["ids"][0].dtype == np.int32
    for i, a in enumerate(back["a"]):
        assert back["ids"][i].tolist() == lists[a] and np.array_equal(back["pair"][i], pairs[a])
        assert bytes(back["text"][i]).decode() == COLUMNS["text"][a] and len(back["word"][i]) == 1 + a % 2


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, None], "column 'x' has 1 empty values; fill or drop them"),
        ([[["a"]], [["b"]]], "column 'x' is list.*which no tensor holds"),
        ([{"a": 1}, {"a": 2}], "column 'x' is struct<a: int64>, which no tensor holds"),
    ],
)
def test_columns_that_no_tensor_holds(tmp_path, column, message):
    parquet.write_table(table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "a.parquet")


# ---- archives


def make_tar(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> None:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples, first):
            for ending, content in sample.items():
                member = tarfile.TarInfo(f"part/{number:04d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_webdataset_archives_are_read_in_any_order(tmp_path):
    samples = [
        {
            "cls": str(i).encode(),
            "seg.npy": npy(np.full(3, i, np.int16)),
            "txt": b"t" * (i % 3),
            "json": b"{}",
        }
        for i in range(20)
    ]
    make_tar(tmp_path / "a-0.tar", samples[:12])
    make_tar(tmp_path / "a-1.tar", samples[12:], 12)
    back = opened(f"{tmp_path}/a-*.tar")
    assert sorted(back["cls"]) == list(range(20)) and set(back) == {"cls", "seg_npy", "txt", "json"}
    assert np.array_equal(back["seg_npy"][:, 2], back["cls"])
    assert [len(text) for text in back["txt"]] == [i % 3 for i in back["cls"]]
    assert set(opened(tmp_path / "a-0.tar", arrays="x=seg.npy,y=cls")) == {"x", "y"}
    make_tar(tmp_path / "b.tar", [{"npy": npy(np.arange(i)), "cls": b"%d" % i} for i in range(6)])
    back = opened(tmp_path / "b.tar", variable=("npy",))
    assert all(x.tolist() == list(range(n)) for x, n in zip(back["npy"], back["cls"]))


def test_images_in_archives(tmp_path):
    pixels = make_images(tmp_path / "images", [(4, 4)] * 6)
    contents = [(tmp_path / "images" / f"class{i % 3}" / f"{i}.png").read_bytes() for i in range(6)]
    make_tar(tmp_path / "a.tar", [{"png": content, "cls": b"%d" % i} for i, content in enumerate(contents)])
    back = opened(tmp_path / "a.tar")
    assert all(
        np.array_equal(image, pixels[i].transpose(2, 0, 1)) for i, image in zip(back["cls"], back["png"])
    )
    assert sorted(opened(tmp_path / "a.tar", encoded=True)["png"], key=len)[0].dtype == np.uint8


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"cls": b"1"}, {"txt": b"a"}],
            r"part/0001\.txt: is not in the first sample, part/0000; every sample needs the same",
        ),
        ([{"cls": b"dog"}], r"part/0000\.cls: is b'dog', expected a whole number"),
        ([{"npy": b"no"}], r"part/0000\.npy: cannot be read as \.npy"),
        (
            [{"npy": npy(np.zeros(2))}, {"npy": npy(np.zeros(3))}],
            "expected float64.2.; if samples differ.*--variable",
        ),
        ([{"pkl": b"x"}], r"\.pkl is pickled Python, which is not executed; leave it out"),
        ([{"npy": npy(np.array([{}], dtype=object))}], r"cannot be read as \.npy"),
        ([], "holds no files"),
    ],
)
def test_archives_that_hold_no_samples(tmp_path, samples, message):
    make_tar(tmp_path / "a.tar", samples)
    with pytest.raises((DataError, UsageError), match=message):
        opened(tmp_path / "a.tar")


def test_a_truncated_or_compressed_archive(tmp_path):
    make_tar(tmp_path / "a.tar", [{"txt": b"t" * 5000}, {"txt": b"t" * 5000}])
    os.truncate(tmp_path / "a.tar", 7000)
    with pytest.raises(DataError, match=r"a\.tar.*(truncated|cannot be read as an uncompressed tar)"):
        opened(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"\x1f\x8b" + b"0" * 600)
    with pytest.raises(DataError, match=r"b\.tar: cannot be read as an uncompressed tar file"):
        opened(tmp_path / "b.tar")


# ---- HDF5


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True}, {"chunks": True, "compression": "gzip", "shuffle": True}]
)
def test_hdf5_files_of_others(tmp_path, options):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(2000.0).reshape(1000, 2), **options)
        file.create_dataset("train/y", data=np.arange(1000), **options)
        file["names"] = ["a"] * 1000
    back = opened(tmp_path / "a.h5", arrays="x=x,label=train/y")
    assert sorted(back["label"]) == list(range(1000)) and np.array_equal(back["x"][:, 0], back["label"] * 2.0)
    with pytest.raises(DataError, match=r"dataset 'names' holds text"):
        opened(tmp_path / "a.h5")


# ---- Python


class Dataset:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), index, dtype=torch.float32), index


def test_a_map_style_dataset_is_permuted_and_pairs_are_x_and_y(tmp_path):
    source = as_source(Dataset(), "test")
    back = everything(source)
    assert sorted(back["y"]) == list(range(30)) and np.array_equal(back["x"][:, 1], back["y"])
    pack(Dataset(), tmp_path / "a", validate=0)
    assert not pack(Dataset(), tmp_path / "a", validate=0)[1]
    with pytest.raises(UsageError, match="holds another pack"):
        pack([(np.zeros(2, np.float32), i) for i in range(30)], tmp_path / "a", validate=0)


def test_python_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_samples.py").write_text(
        "def some():\n    for i in range(10):\n        yield {'text': 'a' * i, 'y': i}\nNUMBERS = [1, 2, 3, 4]\n"
    )
    assert main(["data", "pack", "my_samples:some", "a", "--validate", "0"]) == 0
    assert "10 samples in 1 shard" in capsys.readouterr().out
    assert main(["data", "pack", f"{tmp_path}/my_samples.py:NUMBERS", "b"]) == 0
    assert "3 samples in 1 shard" in capsys.readouterr().out
    assert main(["data", "pack", "my_samples:other", "c"]) == 2
    assert "my_samples has no 'other'" in capsys.readouterr().err
    assert main(["data", "pack", "no_such_module:x", "c"]) == 2
    assert main(["data", "pack", "gone.py:x", "c"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [np.zeros(2), np.zeros(3)],
            r"sample 1: array 'x' is float64\[3\], expected float64\[2\].*variable=\('x',\)",
        ),
        ([{"a": 1}, {"b": 1}], "sample 1: has the arrays b, expected a"),
        (
            [{"a": np.zeros(1)}, {"a": np.zeros(1, int)}],
            r"sample 1: array 'a' is int64\[1\], expected float64\[1\]",
        ),
        ([], "holds no samples"),
        ([{"a": object()}], "dtype object, which no tensor holds"),
    ],
)
def test_python_samples_unlike_each_other_are_named(tmp_path, samples, message):
    with pytest.raises(DataError, match=message):
        pack(samples, tmp_path / "a", validate=0)
    if samples:
        with pytest.raises(DataError, match=message):
            pack(iter(samples), tmp_path / "b", validate=0)
    with pytest.raises(UsageError, match="is int; give arrays by name"):
        pack(3, tmp_path)


def test_pack_takes_what_the_command_line_takes(tmp_path):
    make_images(tmp_path / "images", [(8, 6)] * 5)
    manifest, _ = pack(
        tmp_path / "images", tmp_path / "a", image_size=(4, 4), validate=0.2, compression="gzip:1"
    )
    assert manifest.arrays["x"]["shape"] == [3, 4, 4] and manifest.recipe["image_size"] == [4, 4]
    assert manifest.recipe["classes"] == ["class0", "class1", "class2"]
    with pytest.raises(UsageError, match="pack: encoded is for files"):
        pack([1, 2], tmp_path / "b", encoded=True)
    with pytest.raises(TypeError, match="shard_size"):
        pack([1, 2], tmp_path / "b", shard_size=3)


# ---- the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--encoded"], "--encoded: a source such as 'digits' (example) does not take it"),
        (["digits", "--arrays", "z=q"], "there is no 'q'; there are x, y"),
        (["digits", "--arrays", "z="], "expected NAME=COLUMN"),
        (["digits", "--image-size", "5"], "is not HEIGHTxWIDTH"),
        (["digits", "--compression", "lzma"], "expected none, gzip, zstd, blosc"),
        (["dogits"], "unknown source: give `digits`, `topics`, a file that ends in"),
        (["a.xyz"], "unknown source"),
    ],
)
def test_a_wrong_source_or_option_is_answered(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.xyz").write_text("?")
    try:
        code = main(["data", "pack", words[0], "out", *words[1:]])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("PIL", "images", "images"), ("pyarrow", "a.csv", "table"), ("pyarrow", "a.parquet", "table")],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(tmp_path, monkeypatch, module, name, extra):
    make_images(tmp_path / "images", [(2, 2)])
    (tmp_path / "a.csv").write_text("a\n1\n")
    parquet.write_table(table({"a": [1]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'mpitrain\[{extra}\]'"):
        open_source(str(tmp_path / name))
