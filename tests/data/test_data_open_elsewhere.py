"""HDF5 files that somebody else has open, that hold more than NumPy can, and passes over them that never end."""

import errno
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from h5py import h5s, h5t

from mpitrain.data import Shards
from mpitrain.data.format import layout
from mpitrain.data.tools.info import info
from mpitrain.errors import DataError

X = np.arange(40, dtype="f4").reshape(10, 4)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train-0.h5"
    with h5py.File(path, "w") as file:
        file["x"] = X
    return str(path)


def samples(path, **options):
    return sum(len(batch["x"]) for batch in Shards(path, **options).batches(4))


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_this_process_has_open_is_read(shard, locking, mode):
    with h5py.File(shard, mode, locking=locking) as mine:
        assert samples(shard) == 10 and mine["x"].shape == (10, 4)


def test_a_file_that_is_read_is_open_to_others(shard):
    reading = iter(Shards(shard).batches(4))
    next(reading)
    with h5py.File(shard, "r") as theirs:
        assert np.array_equal(theirs["x"], X)
    assert sum(len(batch["x"]) for batch in reading) == 6


def test_one_that_another_process_writes_is_refused_with_what_to_do(shard):
    script = f"import h5py, sys; f = h5py.File({shard!r}, 'r+'); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as writer:
        assert writer.stdout.readline() == b"1\n"
        with pytest.raises(DataError, match="another process has it open for writing.*close it there"):
            samples(shard)
        writer.stdin.close()
    assert samples(shard) == 10


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_none_are_taken(shard, monkeypatch, number):
    asked, opened = [], h5py.File

    def without_locks(path, mode, *, locking, **options):
        asked.append(locking)
        if locking is not False:
            reason = f"unable to lock file, errno = {number}, error message = '{os.strerror(number)}'"
            raise OSError(f"Unable to synchronously open file ({reason})")
        return opened(path, mode, locking=locking, **options)

    monkeypatch.setattr(layout.h5py, "File", without_locks)
    layout.open_shard(shard).close()
    assert asked == [None, False]


def test_a_dataset_of_a_type_that_numpy_lacks_is_refused_by_name_and_the_others_are_read(shard):
    kinds = {"time": h5t.UNIX_D32LE, "bits": h5t.STD_B8LE}
    with h5py.File(shard, "r+") as file:
        for name, kind in kinds.items():
            h5py.h5d.create(file.id, name.encode(), kind, h5s.create_simple((10,)))
    with pytest.raises(DataError, match=r"dataset '(time|bits)' .*Shards\(\.\.\., arrays=") as error:
        samples(shard)
    assert "damaged" not in str(error.value)
    assert samples(shard, arrays=("x",)) == 10
    assert samples(shard, columns={"x": "x"}) == 10
    with pytest.raises(DataError, match="dataset 'time' is of a type that NumPy lacks"):
        samples(shard, arrays=("x", "time"))
    with pytest.raises(DataError, match="dataset '(time|bits)'"):
        list(info(shard))


UNFINISHED = """
import sys, torch
import mpitrain as mt
from torch.utils.data import DataLoader, TensorDataset
shards = mt.Shards(sys.argv[1])
passes = [iter(one) for one in (
    shards.batches(2), shards, mt.Samples(TensorDataset(torch.zeros(8, 2))).batches(2), DataLoader(shards),
    mt.Transformed(shards, lambda batch, random: batch).batches(2))]
for one in passes:
    next(one)
print("end")
"""  # fmt: skip


def test_a_pass_that_is_never_finished_leaves_no_words_at_exit(shard):
    run = subprocess.run(
        [sys.executable, "-c", UNFINISHED, shard], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
