"""Sources of samples, and `mpitrain data` as a person calls it."""

import argparse
import sys

import h5py
import numpy as np
import pytest

from mpitrain.cli.data import add_parser
from mpitrain.data import Shards
from mpitrain.data.sources import load_source
from mpitrain.errors import DataError, UsageError


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["data", *argv])
    return arguments.run(arguments) or 0


def test_digits_on_the_command_line(tmp_path, capsys):
    dest = str(tmp_path / "digits")
    assert run("pack", "digits", dest, "--shard-samples", "400") == 0
    assert (
        "1438 samples in 4 shards" in (out := capsys.readouterr().out) and "359 samples in 1 shard\n" in out
    )
    assert run("pack", "digits", dest, "--shard-samples", "400") == 0
    assert "already packed: nothing to do" in capsys.readouterr().out
    assert run("info", f"{dest}/train-*.h5") == 0
    out = capsys.readouterr().out
    assert "array x: float32[1, 8, 8], 256 bytes a sample" in out and "total: 1438 samples" in out
    source = Shards(f"{dest}/*.h5")
    with source.reader(source.scan(), 0) as reader:
        batch = reader.batch(0, 0, 1797)
    assert batch["x"].min() == 0 and batch["x"].max() == 1
    # the images are scikit-learn's, each with its own label: compare as sets of (label, pixels)
    from sklearn.datasets import load_digits

    digits = load_digits()
    packed = sorted((int(y), *x.flatten().mul(16).int().tolist()) for x, y in zip(batch["x"], batch["y"]))
    assert packed == sorted(
        (int(y), *x.flatten().astype(int).tolist()) for x, y in zip(digits.images, digits.target)
    )


def test_npz_packs_and_reads_back(tmp_path):
    np.savez(tmp_path / "mine.npz", image=np.arange(40.0).reshape(20, 2), label=np.arange(20))
    assert run("pack", str(tmp_path / "mine.npz"), str(tmp_path / "out"), "--validate", "0") == 0
    with h5py.File(tmp_path / "out" / "train-00000.h5") as file:
        part = {name: file[name][()] for name in file}
    assert part["image"].dtype == np.float64
    assert sorted(part["label"].tolist()) == list(range(20))
    assert np.array_equal(part["image"][:, 0], part["label"] * 2.0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, "its arrays differ in length: x has 3, y has 4"),
        ({"x": np.array(3)}, r"array 'x' has shape \(\), expected \(samples, ...\)"),
        ({"x": np.zeros((0, 2))}, r"array 'x' has shape \(0, 2\)"),
        ({"x": np.array(["a", "b"])}, "array 'x' has dtype <U1, which no tensor holds"),
        ({"x": np.array([{}], dtype=object)}, "cannot be read as .npz"),
        ({}, "holds no arrays"),
    ],
)
def test_npz_that_holds_no_samples(tmp_path, arrays, message):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_source(str(tmp_path / "mine.npz"))


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(
        UsageError, match="unknown source 'mnist': give `digits`, `topics` or the path of a .npz file"
    ):
        load_source("mnist")
    with pytest.raises(UsageError, match=r"gone\.npz: no such file"):
        load_source(str(tmp_path / "gone.npz"))
    for content in (b"", b"PK\x03\x04 torn", b"text"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.npz: cannot be read as \.npz"):
            load_source(str(tmp_path / "bad.npz"))


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[data\]'"):
        load_source("digits")


def test_topics_are_runs_of_the_text_that_overlap_by_one_character():
    text = load_source("topics")["text"]
    assert text.dtype == np.uint8 and text.shape[1] == 65 and len(text) > 5000 and text.max() < 128
    assert (text[1:, 0] == text[:-1, 64]).all()
    whole = bytes(text[:, :64].reshape(-1)).decode()
    from pydoc_data.topics import topics

    assert whole.startswith(topics[min(topics)].encode("ascii", "ignore").decode())
