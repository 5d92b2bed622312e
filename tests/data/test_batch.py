"""Batches arrive as torch's `default_collate` makes them, whoever makes, moves, cuts or joins them; the oracle is
torch's own loader. A batch that is taken for something else is told in one line."""

import collections
import dataclasses
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import mpitrain as mt
from mpitrain.data.read.batch import Pair, as_batch, cut, join, map_leaves, num_samples_in, to_device
from mpitrain.data.read.batch_mistakes import explaining
from mpitrain.errors import DataError, UsageError

X, Y = torch.arange(24.0).reshape(12, 2), torch.arange(12)
Sample = collections.namedtuple("Sample", ["image", "label"])
SHAPES = {
    "pair": lambda i: (X[i], Y[i]),
    "list of two": lambda i: [X[i], Y[i]],
    "one in a tuple": lambda i: (X[i],),
    "three": lambda i: (X[i], Y[i], i),
    "four with a text": lambda i: (X[i], Y[i], f"file {i}", 0.5 * i),
    "named": lambda i: Sample(X[i], i),
    "dict": lambda i: {"x": X[i], "y": i},
    "dict with a text": lambda i: {"x": X[i], "file": f"{i}.png"},
    "nest": lambda i: ({"left": X[i], "right": [X[i], Y[i]]}, Sample(X[i], i), Y[i]),
    "pair of pairs": lambda i: ((X[i], Y[i]), {"y": Y[i]}),
    "one tensor": lambda i: X[i],
    "an array": lambda i: X[i].numpy(),
}


def samples_of(shape):
    return [SHAPES[shape](i) for i in range(12)]


def untyped(batch):
    """Lists for tuples: what torch makes of a tuple."""
    if type(batch) in (tuple, Pair):
        batch = list(batch)
    if isinstance(batch, list):
        return [untyped(one) for one in batch]
    if isinstance(batch, tuple):
        return type(batch)(*map(untyped, batch))
    return {name: untyped(one) for name, one in batch.items()} if isinstance(batch, dict) else batch


def same(one, other):
    (found, structure), (expected, other_structure) = tree_flatten(untyped(one)), tree_flatten(untyped(other))
    assert structure == other_structure
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b


class Passed(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_are_what_torchs_loader_makes(shape):
    samples = samples_of(shape)
    expected = list(DataLoader(samples, batch_size=5))
    for source in (mt.Samples(samples), mt.Stream(Passed(samples))):
        with source.reader(source.scan(), 0) as reader:
            found = list(reader.sequential(5))
        for one, other in zip(found, expected, strict=True):
            same(one, other)
            assert num_samples_in(one) == num_samples_in(as_batch(other)) and num_samples_in(one) in (2, 5)
        if isinstance(samples[0], tuple):
            assert isinstance(found[0], tuple)


def test_batches_come_out_of_processes_as_they_were_made():
    samples = [(SHAPES["nest"](i), SHAPES["dict with a text"](i)) for i in range(12)]
    source = mt.Samples(samples, num_workers=1)
    with source.reader(source.scan(), 0) as reader:
        (batch,) = reader.sequential(12)
    same(batch, default_collate(samples))
    assert type(batch) is Pair and batch["y"]["file"][3] == "3.png"


def test_a_pair_is_a_tuple_and_answers_by_name():
    pair = as_batch([X, Y])
    x, y = pair
    assert isinstance(pair, tuple) and len(pair) == 2 and (lambda *both: both)(*pair) == (X, Y)
    assert x is X is pair["x"] is pair[0] and y is Y is pair["y"] is pair[-1] and pair[:1] == (X,)
    assert list(pair.keys()) == ["x", "y"] and {**pair} == dict(pair.items()) == {"x": X, "y": Y}
    assert list(pair.values()) == [X, Y] and pair.get("z", 3) == 3
    assert "x" in pair and "z" not in pair and X in pair and torch.ones(1) not in pair
    pair["x"], pair[1] = 1, 2  # as the list, and the dict, that it was elsewhere
    assert tuple(pair) == (1, 2) == (pair["x"], pair["y"]) and type(as_batch(pair)) is Pair
    again = pickle.loads(pickle.dumps(pair))
    assert type(again) is Pair and tuple(again) == (1, 2)
    pair["mask"] = 3
    assert as_batch(pair) == {"x": 1, "y": 2, "mask": 3} and len(pair) == 3
    (only,) = one = as_batch((X,))
    assert only is X is one["x"] and list(one.keys()) == ["x"] and "y" not in one


class Moving:
    """An object of another library."""

    def __init__(self, values, device="cpu"):
        self.values, self.device = values, torch.device(device)

    def to(self, device):
        return Moving(self.values.to(device), device)


class InPlace(collections.UserDict):
    def to(self, device):
        self.data = {name: one.to(device) for name, one in self.data.items()}


@dataclasses.dataclass
class Record:
    image: torch.Tensor


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_made_of_a_batch_has_its_structure(shape):
    whole = as_batch(default_collate(samples_of(shape)))
    moved = to_device(whole, "meta")
    assert tree_flatten(moved)[1] == tree_flatten(whole)[1]
    assert {one.device.type for one in tree_leaves(moved) if isinstance(one, torch.Tensor)} == {"meta"}
    same(map_leaves(lambda one: one, whole), whole)
    parts = cut(whole, 3)
    assert [num_samples_in(part) for part in parts] == [4, 4, 4] and type(parts[0]) is type(whole)
    same(join(parts), whole)
    same(parts[1], as_batch(default_collate(samples_of(shape)[4:8])))


def test_objects_move_themselves_or_are_refused_by_name():
    def read(collate_fn):
        source = mt.Samples(TensorDataset(X, Y), collate_fn=collate_fn)
        with source.reader(source.scan(), 0) as reader:
            return next(reader.sequential(4))

    graphs = read(lambda items: Moving(torch.stack([x for x, _ in items])))
    assert to_device(graphs, "meta").values.is_meta and num_samples_in(graphs) is None
    encoded = read(lambda items: InPlace(x=torch.stack([x for x, _ in items])))
    assert to_device(encoded, "meta")["x"].is_meta and num_samples_in(encoded) == 4
    detections = read(lambda items: tuple(zip(*((x, {"box": y}) for x, y in items), strict=True)))
    assert len(detections) == 2 and num_samples_in(detections) is None
    assert to_device(detections, "meta")[1][3]["box"].is_meta
    mixed = read(lambda items: (Moving(X[: len(items)]), torch.zeros(len(items))))
    assert to_device(mixed, "meta")["x"].values.is_meta and num_samples_in(mixed) == 4
    assert read(lambda items: {"x": np.zeros(len(items))})["x"].dtype is torch.float64
    for collate_fn, text in {
        lambda items: Record(X[: len(items)]): r"holds a Record with tensors, .* a method to\(device\)",
        lambda items: {"a": Record(X), "b": X}: r"holds a Record with tensors",
        lambda items: (): "made an empty batch",
        lambda items: [x for x, _ in items]: "made a batch of 2 rows from 1 samples",
    }.items():
        with pytest.raises(DataError, match=text):
            mt.Samples(TensorDataset(X, Y), collate_fn=collate_fn).scan()
            read(collate_fn)
    with pytest.raises(UsageError, match="cannot cut a batch of a tuple of 2"):
        cut(detections, 2)


def test_samples_that_differ_in_kind_are_named():
    for odd, text in (
        ((X[0],), "sample 1 has x, expected x, y as sample 0"),
        ({"x": X[0]}, "sample 1 has x, expected x, y as sample 0"),
        ({"x": X[0], "y": Y[0]}, "make no batch: TypeError: some are dicts and some are not"),
    ):
        source = mt.Samples([(X[0], Y[0]), odd])
        with source.reader(source.scan(), 0) as reader, pytest.raises(DataError, match=text):
            next(reader.sequential(2))
    source = mt.Samples([("a", 1), (X[0], 1)])
    with (
        source.reader(source.scan(), 0) as reader,
        pytest.raises(DataError, match="'x' of sample 1 is float32"),
    ):
        next(reader.sequential(2))


def test_transforms_are_given_and_give_what_a_batch_may_be():
    def read(samples, transform):
        source = mt.Transformed(mt.Samples(samples), transform)
        with source.reader(source.scan(), 0) as reader:
            return next(reader.sequential(4))

    def by_name(batch, random):
        batch["x"] = batch["x"] + 1
        return batch

    assert torch.equal(read(samples_of("pair"), by_name)[0], X[:4] + 1)
    doubled = read(samples_of("pair"), lambda batch, random: (2 * batch[0], batch[1]))
    assert type(doubled) is Pair and torch.equal(doubled["x"], 2 * X[:4])
    named = read(samples_of("named"), lambda batch, random: batch._replace(image=-batch.image))
    assert torch.equal(named.image, -X[:4])
    assert torch.equal(read(samples_of("one tensor"), lambda batch, random: batch + 1), X[:4] + 1)
    with pytest.raises(DataError, match="given 4 samples and has returned 3"):
        read(samples_of("three"), lambda batch, random: tuple(one[:3] for one in batch))
    with pytest.raises(DataError, match=r"transform <lambda>: .*; a batch holds a tuple of 3 without names"):
        read(samples_of("three"), lambda batch, random: batch["x"])


def two_of(batch):
    x, y = batch
    return torch.add(x, y)


DICT, THREE = {"x": X, "y": Y}, (X, Y, Y)
MISTAKES = [
    (DICT, lambda b: b[0], r"KeyError: 0 .*holds 'x', 'y' by name: batch\['x'\], or x, y = batch.values\(\)"),
    (DICT, two_of, r"not str .*: (x|y) is a name of the batch's, which holds 'x', 'y'.* = batch.values\(\)"),
    (DICT, lambda b: [one.mean() for one in b], "'str' object has no attribute 'mean'.*one is a name"),
    ({**DICT, "z": Y}, two_of, r"too many values.*`x, y = batch`, .*holds 'x', 'y', 'z' by name"),
    (DICT, lambda b: b.image, "'dict' object has no attribute 'image'.*holds 'x', 'y'"),
    (DICT, lambda b: torch.relu(b), "not dict .*holds 'x', 'y' by name"),
    (DICT, lambda b: b["z"], r"asks for 'z' \(.*line \d+\), and a batch holds 'x', 'y'"),
    (THREE, lambda b: b["image"], r"not str .*holds a tuple of 3 without names: batch\[0\] to batch\[2\]"),
    (THREE, two_of, "too many values to unpack.*holds a tuple of 3"),
    (THREE, lambda b: b.keys(), "no attribute 'keys'.*holds a tuple of 3"),
    (THREE, lambda b: b[3], "out of range.*holds a tuple of 3"),
    (as_batch((X, Y)), lambda b: b["image"], "asks for 'image' .*a tuple of 2, 'x', 'y': x, y = batch, or batch"),
    (as_batch((X, Y)), lambda b: b[2], "out of range.*holds a tuple of 2"),
    (as_batch((X, Y)), lambda b: torch.relu(b), "not Pair.*holds a tuple of 2, 'x', 'y'"),
    (as_batch((X,)), two_of, r"not enough values.*holds a tuple of 1, 'x': x, = batch, or batch\['x'\]"),
    (Sample(X, Y), lambda b: b["image"], "holds a Sample of image, label: batch.image"),
    (X, lambda b: b["x"], r"invalid data type 'str'.*holds one tensor of shape \(12, 2\): .* as in model\(batch\)"),
    (X, two_of, "too many values.*holds one tensor of shape"),
    (Moving(X), lambda b: b["x"], "not subscriptable.*holds a Moving"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "function", "text"), MISTAKES)
def test_who_takes_a_batch_for_something_else_is_told_what_it_holds(batch, function, text):
    with pytest.raises(UsageError, match=text) as raised, explaining("Job: loss", batch, UsageError):
        function(batch)
    assert "\n" not in str(raised.value) and "test_batch.py, line " in str(raised.value)
    assert str(raised.value).startswith("Job: loss")


@pytest.mark.parametrize(
    "function",
    [
        lambda b: [1, 2][len(X)],
        lambda b: {}[3],
        lambda b: int("a") + b,
        lambda b: Y.image,
        lambda b: [one for one in (1, 2, 3) if (lambda: None)(one)],
        lambda b: X @ torch.ones(5),
    ],
)
def test_other_mistakes_are_what_they_were(function):
    for batch in (DICT, THREE, as_batch((X, Y)), X):
        with pytest.raises(Exception) as plain:
            function(batch)
        with pytest.raises(type(plain.value)) as raised, explaining("Job: loss", batch, UsageError):
            function(batch)
        assert str(raised.value) == str(plain.value) and type(raised.value) is type(plain.value)


def test_named_tuples_are_packed_by_their_names(tmp_path):
    mt.pack([Sample(X[i].numpy(), i) for i in range(12)], tmp_path / "named")
    source = mt.Shards(str(tmp_path / "named" / "train-*.h5"))
    assert set(source.scan().arrays) == {"image", "label"}
    with source.reader(source.scan(), 0) as reader, warnings.catch_warnings():
        assert type(next(reader.sequential(4))) is dict  # as every batch of shards


def test_a_loop_of_ones_own_gets_such_batches_from_any_source():
    batches = mt.Samples(samples_of("three")).batches(5)
    assert [tuple(map(len, batch)) for batch in batches] == [(5, 5, 5), (5, 5, 5), (2, 2, 2)]
