"""What is written is what is read, or it is refused: trees, parts, folders."""

import errno
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint import newest, read_part, write_part
from mpitrain.checkpoint.keeper import Keeper
from mpitrain.checkpoint.parts import folder_of, listed, prune, verify
from mpitrain.checkpoint.tree import join, split
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.rules.checkpointing import CheckpointPolicy, read_policy

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.text()), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@given(TREES)
def test_a_tree_comes_back_as_it_went_in_types_and_keys_included(tree):
    structure, tensors = split(tree)
    assert join(json.loads(json.dumps(structure)), tensors) == tree


def test_tensors_of_every_dtype_come_back_to_the_bit(tmp_path):
    dtypes = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.uint8,
    ]
    tree = {"state": {0: {"step": torch.tensor(3.0), "x": [torch.arange(6).to(d)[::2] for d in dtypes]}}}
    write_part(tmp_path, "shard-0", tree, ["shard-0"])
    back = read_part(tmp_path, "shard-0")["state"][0]
    assert back["step"] == 3.0
    for saved, given_ in zip(back["x"], tree["state"][0]["x"], strict=True):
        assert saved.dtype == given_.dtype and torch.equal(saved, given_)


def test_what_cannot_be_held_is_named():
    with pytest.raises(TypeError, match="state/a/1: a checkpoint cannot hold a complex"):
        split({"a": [1, 2j]})


def checkpoint(run_dir, mark, value=0.0, shards=2):
    for shard in reversed(range(shards)):
        needs = [f"shard-{i}" for i in range(shards)] if shard == 0 else []
        state = {"x": torch.full((100,), value), "mark": mark}
        write_part(folder_of(run_dir, mark), f"shard-{shard}", state, needs, {"seed": 0})


def test_the_newest_complete_one_wins_and_the_others_are_named(tmp_path):
    assert newest(tmp_path) is None
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    write_part(folder_of(tmp_path, 300), "shard-0", {}, ["shard-0", "shard-1"])  # shard 1 died before writing
    found = newest(tmp_path)
    assert found.mark == 200 and found.parts == ("shard-0", "shard-1")
    assert len(found.refused) == 1 and "shard-1.json was never finished" in found.refused[0]


def test_two_hundred_random_corruptions_are_all_seen_and_the_one_before_is_used(tmp_path):
    draw = random.Random(11)
    checkpoint(tmp_path, 100, value=1.0)
    checkpoint(tmp_path, 200, value=2.0)
    files = sorted(folder_of(tmp_path, 200).iterdir())
    whole = {path: path.read_bytes() for path in files}
    for _ in range(200):
        path = draw.choice(files)
        data = bytearray(whole[path])
        kind = draw.choice(["flip", "truncate", "empty", "grow", "lose"])
        if kind == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == "truncate":
            del data[draw.randrange(len(data)) :]
        elif kind == "empty":
            data.clear()
        else:
            data += bytes([draw.randrange(256)])
        path.unlink() if kind == "lose" else path.write_bytes(data)
        if path.suffix == ".json" and kind == "grow" and not bytes(data[-1:]).strip():
            path.write_bytes(whole[path] + b"{")  # white space after JSON changes nothing
        found = newest(tmp_path)
        assert found.mark == 100 and len(found.refused) == 1, (path, kind)
        path.write_bytes(whole[path])
    assert newest(tmp_path).mark == 200


def test_when_nothing_verifies_that_is_said_with_every_reason(tmp_path):
    checkpoint(tmp_path, 100)
    (folder_of(tmp_path, 100) / "shard-1.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="no checkpoint under .* verifies: .*shard-1.safetensors is damaged"
    ):
        newest(tmp_path)


def test_killed_while_the_first_was_written_is_as_if_there_were_none(tmp_path):
    """Otherwise a run that is started again with --resume auto would never start."""
    write_part(folder_of(tmp_path, 100), "shard-0", {}, ["shard-0", "shard-1"])
    (folder_of(tmp_path, 100) / ".shard-1.safetensors.tmp").write_bytes(b"half")
    folder_of(tmp_path, 200).mkdir()
    assert newest(tmp_path) is None
    (folder_of(tmp_path, 100) / "shard-0.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"shard-0.json is damaged"):
        newest(tmp_path)


def test_old_ones_go_the_last_complete_ones_stay(tmp_path):
    for mark in (100, 200, 300):
        checkpoint(tmp_path, mark)
    write_part(folder_of(tmp_path, 400), "shard-1", {})  # under way
    write_part(folder_of(tmp_path, 50), "shard-1", {})  # never completed
    prune(tmp_path, 2)
    assert [int(path.name) for path in listed(tmp_path)] == [400, 300, 200]


WRITER = """
import sys, torch
from pathlib import Path
from mpitrain.checkpoint.parts import folder_of, write_part
run_dir = Path(sys.argv[1])
print("ready", flush=True)
for mark in range(1, 10**6):
    state = {"x": torch.full((20000,), float(mark))}
    write_part(folder_of(run_dir, mark), "shard-1", state)
    write_part(folder_of(run_dir, mark), "shard-0", state, ["shard-0", "shard-1"])
"""


def test_killed_at_any_instant_of_writing_a_complete_one_is_there(tmp_path):
    draw = random.Random(5)
    for number in range(6):
        run_dir = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(run_dir)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        while len(listed(run_dir)) < 3:
            pass
        for _ in range(draw.randrange(2000)):
            os.getpid()
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = newest(run_dir)
        for name in found.parts:
            assert bool((read_part(found.folder, name)["x"] == float(found.mark)).all())


def test_a_full_disk_leaves_the_one_before_and_says_so(tmp_path):
    checkpoint(tmp_path, 100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    keeper = Keeper(tmp_path, "shard-0", CheckpointPolicy(), warn=said.append)
    keeper._more = lambda: {"store": torch.zeros(100_000)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        for mark in (200, 300):
            keeper.save(mark, {}, ("shard-0",))
            keeper._thread.join()
        keeper.save(400, {}, ("shard-0",))
        with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
            keeper.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(said) == 3 and os.strerror(errno.EFBIG) in said[0] and "untouched" in said[0]
    assert newest(tmp_path).mark == 100
    assert not list(tmp_path.rglob("*.tmp"))


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch " + os.environ["BOMB"],))


def test_a_malicious_pickle_offered_as_a_checkpoint_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    for path in folder_of(tmp_path, 200).iterdir():
        path.write_bytes(pickle.dumps(Bomb()))
    assert newest(tmp_path).mark == 100
    assert not (tmp_path / "exploded").exists()


def test_another_schema_is_refused_by_name(tmp_path):
    from mpitrain.checkpoint import parts

    checkpoint(tmp_path, 100)
    before, parts.SCHEMA = parts.SCHEMA, 2
    try:
        with pytest.raises(CheckpointError, match="has schema 1; this version reads 2"):
            verify(folder_of(tmp_path, 100))
    finally:
        parts.SCHEMA = before


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("5000", CheckpointPolicy(samples=5000)),
        ("5000 samples", CheckpointPolicy(samples=5000)),
        ("60s", CheckpointPolicy(seconds=60.0)),
        ("0.5 s", CheckpointPolicy(seconds=0.5)),
        ("never", CheckpointPolicy()),
        ("auto", CheckpointPolicy(auto=True)),
    ],
)
def test_policies_are_read(text, policy):
    assert read_policy(text) == policy


@pytest.mark.parametrize("text", ["0", "0s", "-5", "60m", "often", "5000s samples", "nan s"])
def test_other_policies_are_refused_with_what_is_expected(text):
    with pytest.raises(UsageError, match='expected samples such as "5000"'):
        read_policy(text)


def test_auto_is_young_and_dalys_optimum():
    """T* = sqrt(2 C M) minimises the share of time lost, C/T + T/(2M)."""
    policy = read_policy("auto", mtbf_s=20_000.0)
    best = policy.interval_s(4.0)
    assert best == 400.0

    def lost(interval_s):
        return 4.0 / interval_s + interval_s / (2 * 20_000.0)

    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
