"""What data are about to become is said before training: counts, types, ranges, and what is surprising."""

import json
import math
import re

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.data import Shards, preflight
from mpitrain.data.datasets.as_source import as_source
from mpitrain.data.preflight import look
from mpitrain.data.write.pack import pack
from mpitrain.errors import UsageError

X = np.random.default_rng(0).normal(size=(96, 3)).astype("f4")
Y = np.arange(96) % 3


def seen(value):
    source = as_source(value)
    return look(source, source.scan(), longest_s=math.inf)


def shards(folder, **arrays):
    pack(arrays, folder, validate=0, shard_samples=24, chunk_samples=8)
    return Shards(str(folder / "train-*.h5"))


ODD = {
    "y": (np.full(96, 3), "y: is 3 in each of the 96 samples looked at: all labels are one class"),
    "x": (
        np.where(np.arange(288).reshape(96, 3) == 1, np.nan, X),
        "x: 1 of 288 values of the 96 samples .* not finite",
    ),
    "c": (X * [1, 0, 1] + [0, 4, 0], r"c: its column\(s\) 1 \(from 0\) have the same value"),
    "white": (
        np.where(X > -1, 65535, 12).astype("u2"),
        "white: 0.[0-9]+ of its values are 65535, the largest that uint16 holds",
    ),
    "flat": (np.full((96, 1, 4, 4), 0.5), "flat: is 0.5 in each of the 96 samples looked at: constant"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", ["shards", "dataset", "pack"])
def test_what_is_surprising_is_a_warning_with_the_name(tmp_path, name, kind, capsys):
    values, message = ODD[name]
    arrays = {"other": X, name: values}
    if kind == "pack":
        with pytest.warns(UserWarning, match=message) as told:
            pack(arrays, tmp_path / "a")
        assert len(told) == 1
        return
    with pytest.warns(UserWarning, match=message):
        source = shards(tmp_path / "a", **arrays)
    found = seen(source if kind == "shards" else arrays)
    if kind == "dataset":  # of which it makes fewer
        message = message.replace("96", "32").replace("288", "96")
    (line,) = found.warnings()
    assert found.num_samples == 96 and re.match(message, line)


def test_what_is_not_surprising_is_said_without_a_warning(tmp_path):
    found = seen(shards(tmp_path / "a", x=X, y=Y, image=np.repeat(Y, 16).reshape(96, 1, 4, 4).astype("u1")))
    assert (found.num_samples, found.num_files, found.looked_at, found.warnings()) == (96, 4, 96, [])
    low, high = f"{X.min():.4g}", f"{X.max():.4g}"
    assert found.lines() == [
        "image: uint8[1, 4, 4] from 0 to 2",
        f"x: float32[3] from {low} to {high}",
        "y: int64[] from 0 to 2",
    ]


def test_types_before_and_after_reading_and_few_samples(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"] = np.arange(6, dtype="i2")
        file["t"].attrs["scale_factor"] = 0.5
        file.attrs["_NCProperties"] = b"version=2"
    found = seen(Shards(str(tmp_path / "a.nc")))
    assert found.lines() == ["t: float32[] (stored as int16) from 0 to 2.5"]
    assert found.warnings() == ["only 6 samples"]


def test_looking_is_bounded_in_time_and_never_fails(tmp_path, monkeypatch):
    class Slow(Dataset):
        made = 0

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            self.made += 1
            return {"x": torch.zeros(2)}

    slow = Slow()
    source = as_source(slow)
    assert (
        look(source, source.scan(), longest_s=-1).looked_at == 1 and slow.made == 2
    )  # one tells what they are like
    assert look(source, source.scan()).looked_at == 32
    source = shards(tmp_path / "a", x=X)
    catalogue = source.scan()
    (tmp_path / "a" / "train-00001.h5").write_bytes(b"gone")
    assert "train-00001.h5: is not an HDF5 file" in look(source, catalogue).summary()
    assert "is not looked at" in seen(mt.Synthetic(10, x=((2,), "float32"))).summary()


def test_a_large_chunk_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "LARGEST_BYTES", 90)
    assert "its chunks have" in seen(shards(tmp_path / "a", x=X)).summary()


def test_the_commands_print_it(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x=X, y=np.zeros(96, "i4"))
    assert main(["data", "pack", str(tmp_path / "a.npz"), str(tmp_path / "a"), "--validate", "0"]) == 0
    packed = capsys.readouterr().out
    assert f"{tmp_path}/a.npz: 96 samples, 96 looked at\n  x: float32[3] from " in packed
    assert "note: y: is 0 in each of the 96 samples looked at: all labels are one class" in packed
    assert main(["data", "info", str(tmp_path / "a")]) == 0
    told = capsys.readouterr().out
    assert "values: 96 samples in 1 file, 96 looked at\n  x: float32[3] from " in told
    assert "warning: y: is 0 in each" in told


# ---- a tuple of arrays is no dataset, a dict of them is one


@pytest.mark.parametrize(
    "wrong", [(torch.zeros(9, 2), torch.zeros(9)), (X, Y), [X, Y], (X, X, Y), (X,), (X.tolist(), Y.tolist())]
)
@pytest.mark.parametrize("key", ["data", "validate"])
def test_a_tuple_of_arrays_is_refused_with_what_to_write(tmp_path, wrong, key):
    fields = {"data": TensorDataset(torch.zeros(9, 2)), key: wrong}
    with pytest.raises(UsageError, match=rf"Job: {key}: a (tuple|list) of . arrays .*TensorDataset\(X"):
        mt.Job(model=nn.Module, loss=print, optimizer=print, epochs=1, **fields)
    with pytest.raises(UsageError, match=r"TensorDataset\(X"):
        mt.Job(model=nn.Module, loss=print, optimizer=print, epochs=1, data=DataLoader(wrong, shuffle=True))
    for use in (lambda: mt.Samples(wrong), lambda: pack(wrong, tmp_path / "a")):
        with pytest.raises(UsageError, match=r"TensorDataset\(X"):
            use()


def test_samples_in_a_list_or_tuple_are_samples():
    for samples in (
        [(x, y) for x, y in zip(X, Y)],
        tuple({"x": x} for x in X),
        [torch.zeros(2)] * 96,
        list(X),
    ):
        assert as_source(samples).scan().num_samples == 96


def test_a_dict_of_arrays_is_a_dataset_of_named_columns():
    columns = {"x": torch.from_numpy(X), "y": Y.astype(">i4"), "w": [0.5] * 96}
    source = as_source(columns)
    catalogue = source.scan()
    assert {name: str(spec) for name, spec in catalogue.arrays.items()} == {
        "w": "float64[]", "x": "float32[3]", "y": "int32[]"}  # fmt: skip
    with source.reader(catalogue, 0) as reader:
        batch = reader.batch(0, 0, 96)
    order = np.lexsort(batch["x"].numpy().T)
    assert np.array_equal(batch["x"].numpy()[order], X[np.lexsort(X.T)])
    assert np.array_equal(batch["y"].numpy()[order], Y[np.lexsort(X.T)])
    job = mt.Job(
        model=nn.Module, loss=print, optimizer=print, epochs=1, data=DataLoader(columns, 8, shuffle=True)
    )
    assert job.data.scan().num_samples == 96 and job.batch_size == 8


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "an empty dict"),
        ({"x": X, "y": Y[:5]}, "'x' has 96, 'y' has 5"),
        ({"x": np.array(3.0)}, "'x' is a single value"),
        ({"x": ["a", "b"]}, "'x' is list, which makes no array of numbers"),
        ({"x": [[1], [2, 3]]}, "'x' is list, which makes no array"),
        ({"train": TensorDataset(torch.zeros(3))}, "'train' is TensorDataset, which makes no array"),
        ({0: X}, "have names, got 0"),
    ],
)
def test_a_dict_that_is_none_is_refused_by_column(columns, message):
    with pytest.raises(UsageError, match=message):
        mt.Job(model=nn.Module, loss=print, optimizer=print, epochs=1, data=columns)


JOB = """
import numpy as np, torch, mpitrain as mt
x = np.arange(96, dtype="f4").reshape(48, 2)
job = mt.Job(model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch["x"] * 0).sum(),
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=1, batch_size=8,
             data={"x": x, "y": np.zeros(48, "i4")}, validate={"x": x[:4], "y": np.arange(4)})
"""


def test_a_dry_run_and_a_run_begin_with_it(tmp_path, capsys):
    (tmp_path / "job.py").write_text(JOB)
    assert main(["train", str(tmp_path / "job.py"), "--dry-run", "--ranks", "1"]) == 0
    planned = capsys.readouterr().out
    assert "samples     48 samples, 32 looked at\n            x: float32[2] from 0 to 95\n" in planned
    assert "            warning: y: is 0 in each of the 32 samples" in planned
    assert "validation  4 samples, 4 looked at\n" in planned
    common = ["--threads", "1", "--steps", "1", "--run-dir", str(tmp_path / "run")]
    assert main(["train", str(tmp_path / "job.py"), "--strategy", "sync()", *common]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = [(row["event"], row.get("of") or row.get("text")) for row in rows[1:5]]
    assert [event for event, _ in first] == ["data", "warning", "data", "warning"]
    assert [said.split(":")[0] for _, said in first] == [
        "train",
        "data of train",
        "validate",
        "data of validate",
    ]
    assert rows[1]["arrays"] == "x: float32[2] from 0 to 95; y: int32[] from 0 to 0"
