"""Synthetic samples: fixed by (seed, name, index) alone, distributed as stated; and what importing costs."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import Catalogue, Synthetic
from mpitrain.errors import UsageError

SPECS = {"x": ((3, 4), "float32"), "y": ((), "int64", 10)}


def by_id(source: Synthetic, seed: int, size: int = 7) -> dict[int, torch.Tensor]:
    """Global sample id -> x and y of that sample, read in shuffled batches."""
    found = {}
    with source.reader(source.scan(), seed) as reader:
        for start in range(0, source.num_samples, size):
            count = min(size, source.num_samples - start)
            batch = reader.batch(1, start, count)
            for row, sample in enumerate(reader.order.samples(1, start, count).tolist()):
                found[sample] = torch.cat([batch["x"][row].flatten(), batch["y"][row].float()[None]])
    return found


@given(st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=5)
def test_a_sample_depends_only_on_seed_name_and_index(one, other):
    small, large = sorted((one, other))
    short, long = (
        by_id(Synthetic(small, **SPECS), 3),
        by_id(Synthetic(large, **SPECS, z=((2,), "float64")), 3, 64),
    )
    assert len(short) == small
    assert all(torch.equal(short[sample], long[sample]) for sample in short)
    other_seed = by_id(Synthetic(small, **SPECS), 4)
    assert not any(torch.equal(short[sample], other_seed[sample]) for sample in short)


def test_arrays_of_one_spec_differ():
    source = Synthetic(100, a=((5,), "float32"), b=((5,), "float32"))
    with source.reader(source.scan(), 0) as reader:
        batch = reader.batch(0, 0, 100)
    assert not (batch["a"] == batch["b"]).any()


def test_samples_are_distinct_and_distributed_as_stated():
    source = Synthetic(8192, x=((16,), "float32"), y=((), "int64", 10), z=((), "bfloat16"))
    with source.reader(source.scan(), 0) as reader:
        (batch,) = reader.sequential(8192)
    assert len(torch.unique(batch["x"], dim=0)) == 8192
    # 131,072 normals: the mean's standard error is 0.003, the variance's 0.004; labels: 819 each, error 27
    assert abs(batch["x"].mean()) < 0.015 and abs(batch["x"].var() - 1) < 0.02
    assert (torch.bincount(batch["y"], minlength=10) - 819.2).abs().max() < 140
    assert abs(torch.corrcoef(torch.stack([batch["x"][:, 0], batch["y"].float()]))[0, 1]) < 0.05
    assert batch["z"].dtype == torch.bfloat16 and abs(batch["z"].float().var() - 1) < 0.1


@pytest.mark.parametrize(
    ("spec", "dtype", "low", "high"),
    [
        (((2,), torch.float64), torch.float64, None, None),
        (((2,), "float16"), torch.float16, None, None),
        (((2,), "bool", 2), torch.bool, 0, 1),
        (((2,), "uint8", 256), torch.uint8, 0, 255),
        (((2,), "int32", 3), torch.int32, 0, 2),
        (((2,), "int64", 2**63), torch.int64, 0, 2**63 - 1),
        (((2,), "uint64", 2**64), torch.uint64, 0, 2**64 - 1),
    ],
)
def test_every_dtype(spec, dtype, low, high):
    source = Synthetic(2000, x=spec)
    assert source.scan().arrays["x"].dtype == str(dtype).removeprefix("torch.")
    with source.reader(source.scan(), 0) as reader:
        x = reader.batch(0, 0, 2000)["x"]
    assert x.dtype == dtype and x.shape == (2000, 2)
    if low is not None:
        values = x.numpy()
        assert low <= values.min() < values.max() <= high
        assert float(values.max()) > 0.9 * high  # the whole range is drawn from


def test_it_is_a_value():
    source = Synthetic(100, y=((), "int64", 10), x=([3, 4], torch.float32))
    assert repr(source) == "Synthetic(100, x=((3, 4), 'float32'), y=((), 'int64', 10))"
    assert eval(repr(source), {"Synthetic": Synthetic}) == source
    assert hash(source) == hash(Synthetic(100, **SPECS)) and source == Synthetic(100, **SPECS)
    assert Synthetic(**SPECS).num_samples == 8192
    assert Catalogue.from_json(source.scan().to_json()) == source.scan()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((3, "float32"), r"x=\(3, 'float32'\): expected \(shape, dtype\)"),
        (((3,),), "expected"),
        (((3,), "float32", 4), "floats are standard normal and take no high"),
        (((3,), "int64"), r"high must be a whole number in \[1, "),
        (((3,), "int8", 129), r"high must be a whole number in \[1, 128\] for int8"),
        (((3,), "int8", 0), "high must be a whole number"),
        (((0,), "float32"), "a shape holds whole numbers of at least 1"),
        (((3,), "float23"), "dtype 'float23' is none of bool, int8"),
    ],
)
def test_specs_are_checked(spec, message):
    with pytest.raises(UsageError, match=message):
        Synthetic(10, x=spec)


def test_nothing_is_refused():
    with pytest.raises(UsageError, match="name at least one array"):
        Synthetic(10)
    with pytest.raises(UsageError, match="num_samples must be at least 1, got 0"):
        Synthetic(0, **SPECS)
    with pytest.raises(UsageError, match="must not be negative"):
        Synthetic(10, **SPECS).reader(Synthetic(10, **SPECS).scan(), -1)


def test_data_never_imports_mpi_and_its_command_imports_nothing_heavy():
    script = """
import sys
import mpitrain.cli.data
light = {"torch", "h5py", "numpy", "sklearn", "mpi4py"} & set(sys.modules)
assert not light, light
import mpitrain.data, mpitrain.data.write.pack, mpitrain.data.tools.check, mpitrain.data.sources
assert "h5py" in sys.modules and not {"torch", "sklearn", "pyarrow", "PIL"} & set(sys.modules)
mpitrain.data.Shards
assert "torch" in sys.modules and "mpi4py" not in sys.modules and "sklearn" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
