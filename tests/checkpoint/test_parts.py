"""What is written is what is read, or it is refused: trees, parts, folders."""

import errno
import gc
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint import background_writer, newest, read_part, write_part
from mpitrain.checkpoint.background_writer import CheckpointWriter, PartPlan
from mpitrain.checkpoint.parts import (
    OtherSchemaError,
    _digest,
    folder_of,
    listed,
    position_of,
    read_numbers,
    verify,
)
from mpitrain.checkpoint.pruning import Pruner
from mpitrain.checkpoint.state_tree import join, split, structure_of
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.model.copies import copied
from mpitrain.strategies.checkpoint_policy import CheckpointPolicy, read_policy
from mpitrain.system.files.run_directory import MAX_RECORD_BYTES, Identity, progress
from tests.sampling import ALL_CELLS

WRITER = Path(__file__).parent / "programs" / "writes_for_ever.py"

OURS = Identity("run", "attempt")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.integers(0, 10**6).map(lambda number: torch.tensor([float(number)])),
)
# keys that are spelt alike, that hold what separates places, and that are no texts at all
WORDS = st.sampled_from(["a", "b", "a/b", "/", "0", "1", "__tensor__", "__pairs__", ""])
SCALARS = st.one_of(
    WORDS, st.integers(-1, 2), st.floats(allow_nan=False), st.none(), st.booleans(), st.text()
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=3)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def same(one, other):
    """Equal in types, keys (in order, 0 and False and 0.0 told apart) and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(TREES)
def test_a_tree_comes_back_as_it_went_in_types_and_keys_included(tree):
    structure, tensors = split(tree)
    assert same(join(json.loads(json.dumps(structure)), tensors), tree)


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
    write_part(tmp_path, "shard-0", tree, OURS, ["shard-0"])
    back = read_part(tmp_path, "shard-0")["state"][0]
    assert back["step"] == 3.0
    for saved, given_ in zip(back["x"], tree["state"][0]["x"], strict=True):
        assert saved.dtype == given_.dtype and torch.equal(saved, given_)


def test_what_numpy_and_torch_call_numbers_comes_back_with_its_type():
    scalars = [
        np.float32(0.1),
        np.float64("nan"),
        np.int64(-(2**62)),
        np.bool_(True),
        np.float16(1),
        np.complex64(2j),
    ]
    tree = {
        "scalars": scalars, "array": np.arange(6.0).reshape(2, 3), "types": [torch.bfloat16, np.dtype("int8")],
        "device": torch.device("cuda:1"), "complex": 1 + 2j, np.int64(3): "a key",
    }  # fmt: skip
    structure, tensors = split(tree)
    back = join(json.loads(json.dumps(structure)), tensors)
    array = back.pop("array")
    assert array.dtype == np.float64 and (array == tree.pop("array")).all()
    assert str(back) == str(tree) and [type(one) for one in back["scalars"]] == [type(one) for one in scalars]
    assert [type(key) for key in back] == [type(key) for key in tree] and type(back["types"][1]) is np.dtype(
        "int8"
    ).__class__


@pytest.mark.parametrize(
    "structure",
    [
        {"__dtype__": "load"}, {"__dtype__": 3}, {"__device__": []}, {"__numpy__": ["float32"]},
        {"__numpy__": ["object", 1]}, {"__numpy_dtype__": "O"}, {"__complex__": [1]}, {"__float__": True},
        {"__tuple__": "ab"}, {"__pairs__": ["ab"]}, {"__tensor__": "0", "more": 1}, {"__unknown__": 1},
        {"__tensor__": ["0"]}, {"__array__": {}},
    ],
)  # fmt: skip
def test_a_structure_that_nobody_has_made_is_refused(structure):
    with pytest.raises((KeyError, TypeError, ValueError)):
        join({"a": [structure]}, {"0": torch.zeros(1)})


def test_what_cannot_be_held_is_named():
    with pytest.raises(TypeError, match="state/a/1: a checkpoint cannot hold a set"):
        split({"a": [1, {2}]})
    with pytest.raises(TypeError, match="state/a: a checkpoint cannot hold a NumPy array of object"):
        structure_of({"a": np.array([None])})
    with pytest.raises(TypeError, match="state/a: a checkpoint holds plain tensors only"):
        structure_of({"a": torch.eye(2).to_sparse()})
    with pytest.raises(TypeError, match="state/a, a key: a checkpoint cannot hold a frozenset"):
        split({"a": {frozenset(): 1}})
    with pytest.raises(TypeError, match="a number of 20001 bits"):
        split(2**20000)
    endless = []
    endless.append(endless)
    with pytest.raises(TypeError, match="nested deeper than 100"):
        split(endless)


def high_water_bytes():
    """The most memory that this process has held since it last asked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * found


def test_a_part_is_read_into_its_tensors_and_nowhere_else(tmp_path):
    size = 2**26
    write_part(tmp_path, "shard-0", {"x": [torch.ones(size // 8), torch.ones(size // 8)]}, OURS)
    gc.collect()
    high_water_bytes()
    before = high_water_bytes()
    tensors = read_part(tmp_path, "shard-0")["x"]
    # No lower bound: the tensors may lie where an earlier test of this process has freed memory
    # that the allocator still holds.
    assert high_water_bytes() - before <= 1.25 * size
    assert all(bool(one.all()) for one in tensors)


def checkpoint(run_dir, mark, value=0.0, shards=2, identity=OURS):
    for shard in reversed(range(shards)):
        needs = [f"shard-{i}" for i in range(shards)] if shard == 0 else []
        state = {"x": torch.full((100,), value), "mark": mark}
        write_part(folder_of(run_dir, mark), f"shard-{shard}", state, identity, needs, {"seed": 0})


def test_the_newest_complete_one_wins_and_the_others_are_named(tmp_path):
    assert newest(tmp_path) is None
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    write_part(
        folder_of(tmp_path, 300), "shard-0", {}, OURS, ["shard-0", "shard-1"]
    )  # shard 1 died before writing
    found = newest(tmp_path)
    assert found.checkpoint_at == 200 and found.parts == ("shard-0", "shard-1")
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
        assert found.checkpoint_at == 100 and len(found.refused) == 1, (path, kind)
        path.write_bytes(whole[path])
    assert newest(tmp_path).checkpoint_at == 200


def rewritten(folder, name, without="", **changes):
    """A part's JSON with other fields, or without one, and the right checksum."""
    path = folder / f"{name}.json"
    record = {
        key: value for key, value in json.loads(path.read_bytes()).items() if key not in ("self", without)
    }
    record |= changes
    path.write_text(json.dumps(record | {"self": _digest(record)}))


def swap_shards(folder):
    for suffix in ("json", "safetensors"):
        one, other = folder / f"shard-0.{suffix}", folder / f"shard-1.{suffix}"
        one.rename(folder / "between")
        other.rename(one)
        (folder / "between").rename(other)


def take_shard_from(mark):
    def take(folder):
        for suffix in ("json", "safetensors"):
            shutil.copy(folder.with_name(f"{mark:012d}") / f"shard-1.{suffix}", folder)

    return take


def write_shard_1(**identity):
    return lambda folder: write_part(folder, "shard-1", {}, OURS._replace(**identity))


FOREIGN = {
    "swapped shards": (swap_shards, "its part is 'shard-1', not 'shard-0'"),
    "a shard of an older checkpoint": (take_shard_from(100), "its checkpoint_at is 100, not 200"),
    "a shard of another run": (write_shard_1(run="other"), "it is of run 'other', not 'run'"),
    "a shard of a start that died": (write_shard_1(attempt="first"), "never finished in the attempt"),
    "a shard of ranks since lost": (write_shard_1(attempt="attempt.1"), "never finished in the attempt"),
    "no key": (lambda folder: rewritten(folder, "shard-1", "num_bytes"), "it has no 'num_bytes'"),
    "no parts": (lambda folder: rewritten(folder, "shard-0", "parts"), "it has no 'parts'"),
    "wrong type": (lambda folder: rewritten(folder, "shard-0", parts="shard-0"), "it has no 'parts'"),
    "outside": (lambda folder: rewritten(folder, "shard-0", parts=["shard-0", "../x"]), "'../x' is no name"),
    "not itself": (lambda folder: rewritten(folder, "shard-0", parts=["shard-1"]), "are not all parts"),
    "twice": (
        lambda folder: rewritten(folder, "shard-0", parts=["shard-0", "shard-1"] * 2),
        "are not all parts",
    ),
    "a run outside": (lambda folder: rewritten(folder, "shard-0", run="../x"), "is no id of a run"),
    "a state of another type": (lambda folder: rewritten(folder, "shard-1", state=[1]), "it has no 'state'"),
    "a truth for a number": (
        lambda folder: rewritten(folder, "shard-1", num_bytes=True),
        "it has no 'num_bytes'",
    ),
    "from nowhere": (
        lambda folder: rewritten(folder, "shard-0", resumed_from={"run": "run"}),
        "no checkpoint that a run can go on from",
    ),
    "from before the beginning": (
        lambda folder: rewritten(
            folder, "shard-0", resumed_from={"run": "run", "attempt": "first", "checkpoint_at": -1}
        ),
        "no checkpoint that a run can go on from",
    ),
    "from fewer samples than none": (
        lambda folder: rewritten(
            folder,
            "shard-0",
            resumed_from={"run": "run", "attempt": "first", "checkpoint_at": 1, "samples": -1},
        ),
        "no checkpoint that a run can go on from",
    ),
    "a list": (lambda folder: (folder / "shard-0.json").write_text("[]"), "is damaged"),
    "nested": (lambda folder: (folder / "shard-0.json").write_text("[" * 10**6), "nested too deep"),
    "a huge number": (lambda folder: (folder / "shard-0.json").write_text("9" * 10**6), "is damaged"),
    "too large": (lambda folder: os.truncate(folder / "shard-0.json", 2**40), "at most"),
    "tensors too large": (
        lambda folder: os.truncate(folder / "shard-1.safetensors", 2**42),
        "bytes instead of",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_does_not_belong_there_is_told_and_the_checkpoint_before_is_taken(tmp_path, name):
    change, told = FOREIGN[name]
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    change(folder_of(tmp_path, 200))
    found = newest(tmp_path)
    assert found.checkpoint_at == 100 and told in " ".join(found.refused), found
    for part in found.parts:
        assert read_part(found.folder, part, found.identity)["mark"] == 100


def test_a_pipe_in_place_of_a_part_is_not_waited_for(tmp_path):
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    for suffix in ("json", "safetensors"):
        path = folder_of(tmp_path, 200) / f"shard-1.{suffix}"
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert newest(tmp_path).checkpoint_at == 100
        path.unlink()
        path.write_bytes(kept)
    assert newest(tmp_path).checkpoint_at == 200


def test_a_part_whose_state_is_hostile_is_told_when_it_is_read(tmp_path):
    checkpoint(tmp_path, 100)
    folder = folder_of(tmp_path, 100)
    for state in (
        {"__tensor__": "9"},
        {"__pairs__": [[1]]},
        {"__tuple__": 3},
        {"__float__": "x"},
        {"__tensor__": []},
    ):
        rewritten(folder, "shard-1", state=state)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_part(folder, "shard-1")


def test_names_in_checkpoints_that_are_not_ours_are_left_alone(tmp_path):
    checkpoint(tmp_path, 100)
    for name in ("notes", "12", "0000000001x0", "9" * 30, "damaged-000000000200"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir()
        shutil.copy(folder_of(tmp_path, 100) / "shard-0.json", folder)
    (tmp_path / "checkpoints" / f"{300:012d}").write_text("a file")
    (tmp_path / "checkpoints" / f"{400:012d}").symlink_to(tmp_path / "nowhere")
    assert [position_of(folder) for folder in listed(tmp_path)] == [100]
    assert newest(tmp_path).checkpoint_at == 100 and progress(tmp_path) == (100, "run", "attempt", 0)
    Pruner(tmp_path).prune(1, 500, OURS, ("shard-0", "shard-1"))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 8


def test_what_an_earlier_start_has_left_beyond_is_neither_counted_nor_removed_before_its_time(tmp_path):
    """Begun from 100 because 200 was damaged: with keep=1 the new 150 must stay, and 200 not count."""
    again = Identity("run", "second", {"run": "run", "attempt": "attempt", "checkpoint_at": 100})
    for mark in (50, 100, 200):
        checkpoint(tmp_path, mark)
    for mark, left in ((150, [200, 150]), (250, [250])):
        checkpoint(tmp_path, mark, identity=again)
        Pruner(tmp_path).prune(1, mark, again, ("shard-0", "shard-1"))
        assert [position_of(folder) for folder in listed(tmp_path)] == left


def test_what_a_start_went_on_from_counts_among_the_last_and_stays(tmp_path):
    """With keep=2 the first new one stays beside the one that it was begun from, and those before go."""
    again = Identity("run", "second", {"run": "run", "attempt": "attempt", "checkpoint_at": 100})
    for mark in (50, 100):
        checkpoint(tmp_path, mark)
    for mark, left in ((150, [150, 100]), (200, [200, 150])):
        checkpoint(tmp_path, mark, identity=again)
        Pruner(tmp_path).prune(2, mark, again, ("shard-0", "shard-1"))
        assert [position_of(folder) for folder in listed(tmp_path)] == left
    other = Identity("new", "third", {"run": "run", "attempt": "second", "checkpoint_at": 200})
    checkpoint(tmp_path, 250, identity=other)
    Pruner(tmp_path).prune(2, 250, other, ("shard-0", "shard-1"))
    assert [position_of(folder) for folder in listed(tmp_path)] == [250, 200, 150], (
        "another run's do not count"
    )


def test_when_nothing_verifies_that_is_said_with_every_reason(tmp_path):
    checkpoint(tmp_path, 100)
    (folder_of(tmp_path, 100) / "shard-1.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="no checkpoint under .* verifies: .*shard-1.safetensors is damaged"
    ):
        newest(tmp_path)


def test_killed_while_the_first_was_written_is_as_if_there_were_none(tmp_path):
    """Otherwise a run that is started again with --resume auto would never start."""
    write_part(folder_of(tmp_path, 100), "shard-0", {}, OURS, ["shard-0", "shard-1"])
    (folder_of(tmp_path, 100) / ".shard-1.safetensors.tmp").write_bytes(b"half")
    folder_of(tmp_path, 200).mkdir()
    assert newest(tmp_path) is None
    (folder_of(tmp_path, 100) / "shard-0.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"shard-0.json is damaged"):
        newest(tmp_path)


def test_old_ones_go_the_last_complete_ones_stay(tmp_path):
    for mark in (100, 200, 300):
        checkpoint(tmp_path, mark)
    write_part(folder_of(tmp_path, 400), "shard-1", {}, OURS)  # under way
    write_part(folder_of(tmp_path, 50), "shard-1", {}, OURS)  # never completed
    Pruner(tmp_path).prune(2, 400, OURS, ("shard-0", "shard-1"))
    assert [int(path.name) for path in listed(tmp_path)] == [400, 300, 200]


def test_killed_at_any_instant_of_writing_a_complete_one_is_there(tmp_path):
    draw = random.Random(5)
    for number in range(6 if ALL_CELLS else 3):
        run_dir = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, str(WRITER), str(run_dir)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        while len(listed(run_dir)) < 3:
            pass
        for _ in range(draw.randrange(2000)):
            os.getpid()
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = newest(run_dir)
        for name in found.parts:
            assert bool((read_part(found.folder, name)["x"] == float(found.checkpoint_at)).all())


def test_the_writer_leaves_seven_eighths_of_its_core_to_the_training(monkeypatch):
    now_s, slept_s = iter([0.0, 2.0, 2.0, 3.0, 3.0]), []
    monkeypatch.setattr(background_writer.time, "thread_time", lambda: next(now_s))
    rests = background_writer.Rests(SimpleNamespace(wait=slept_s.append))
    rests.take()
    rests.take()
    assert slept_s == [14.0, 7.0]


def test_who_waits_for_a_write_ends_its_rests(tmp_path, monkeypatch):
    monkeypatch.setattr(background_writer, "RESTS", 10**9)
    writer = CheckpointWriter(
        PartPlan(tmp_path, "shard-0", OURS, CheckpointPolicy(), more=lambda: {"x": torch.ones(2**22)})
    )
    for mark in (100, 200):  # the second one waits for the first
        writer.save(mark, {}, ("shard-0",))
    writer.wait()
    assert writer.num_written == 2 and newest(tmp_path).checkpoint_at == 200


def test_who_pauses_copies_nothing_and_goes_on_when_its_part_is_written(tmp_path):
    parameters, were_copied = torch.ones(8), []

    def more():
        state = copied({"x": parameters})
        were_copied.append(state["x"] is not parameters)
        return state

    writer = CheckpointWriter(PartPlan(tmp_path, "shard-0", OURS, CheckpointPolicy(), more=more, pauses=True))
    writer.save(100, {}, ("shard-0",))
    parameters.zero_()
    assert were_copied == [False]
    assert torch.equal(newest(tmp_path).part("shard-0")["x"], torch.ones(8))


def test_a_full_disk_leaves_the_one_before_and_says_so(tmp_path):
    checkpoint(tmp_path, 100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    writer = CheckpointWriter(
        PartPlan(
            tmp_path, "shard-0", OURS, CheckpointPolicy(), warn=said.append,
            more=lambda: {"store": torch.zeros(100_000)},
        )
    )  # fmt: skip
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        for mark in (200, 300):
            writer.save(mark, {}, ("shard-0",))
            writer._thread.join()
        writer.save(400, {}, ("shard-0",))
        with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(said) == 3 and os.strerror(errno.EFBIG) in said[0] and "untouched" in said[0]
    assert newest(tmp_path).checkpoint_at == 100
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("breaks", ["state", "reader"])
def test_a_write_that_fails_in_any_way_is_told_and_the_third_ends_the_run(tmp_path, breaks):
    def reader(folder, parts):
        raise RuntimeError("no room for the best model")

    said = []
    state = {"user": {"a set"}} if breaks == "state" else {}
    more = {} if breaks == "state" else {"on_written": reader}
    writer = CheckpointWriter(
        PartPlan(tmp_path, "shard-0", OURS, CheckpointPolicy(), warn=said.append, **more)
    )
    for mark in (100, 200):
        writer.save(mark, state, ("shard-0",))
        writer.wait()
    assert writer.summary()["num_failed"] == 2 and writer.unwritten == said[1]
    writer.save(300, state, ("shard-0",))
    with pytest.raises(
        CheckpointError, match="3 checkpoints in a row.*(cannot hold a set|no room for the best)"
    ):
        writer.wait()


@pytest.mark.parametrize("state", [{"__tuple__": [1]}, {"__float__": "1"}, {"__tensor__": "0"}])
def test_a_state_that_is_no_dictionary_is_not_handed_on(tmp_path, state):
    checkpoint(tmp_path, 100)
    folder = folder_of(tmp_path, 100)
    rewritten(folder, "shard-0", state=state)
    with pytest.raises(CheckpointError, match="shard-0 cannot be read"):
        read_part(folder, "shard-0")
    with pytest.raises(CheckpointError, match="shard-0 cannot be read"):
        read_numbers(folder, "shard-0", "role", OURS)


def test_a_dry_run_looks_at_the_start_and_after_an_update_and_writes_nothing(tmp_path):
    extra = {}
    writer = CheckpointWriter(
        PartPlan(tmp_path, "own-2", OURS, CheckpointPolicy(), about={"a": 1}, more=lambda: {"store": extra})
    )
    writer.try_out(dict)
    extra["seen"] = {1}
    with pytest.raises(
        UsageError, match="own-2: state/store/seen: a checkpoint cannot hold a set.*keep it out"
    ):
        writer.try_out(dict)
    writer.try_out(dict)  # later states are not looked at
    huge = {"text": "x" * (MAX_RECORD_BYTES + 1)}
    with pytest.raises(UsageError, match="bytes of numbers and texts"):
        CheckpointWriter(PartPlan(tmp_path, "own-2", OURS, CheckpointPolicy())).try_out(lambda: huge)
    assert not list(tmp_path.iterdir())


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch " + os.environ["BOMB"],))


def test_a_malicious_pickle_offered_as_a_checkpoint_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    for path in folder_of(tmp_path, 200).iterdir():
        path.write_bytes(pickle.dumps(Bomb()))
    assert newest(tmp_path).checkpoint_at == 100
    assert not (tmp_path / "exploded").exists()


def test_another_schema_is_refused_by_name(tmp_path):
    from mpitrain.checkpoint import parts

    checkpoint(tmp_path, 100)
    before, parts.SCHEMA = parts.SCHEMA, 4
    try:
        with pytest.raises(
            OtherSchemaError,
            match="shard-0.json was written by mpitrain 0.* schema 3, and this mpitrain 0.* reads schema 4",
        ) as told:
            verify(folder_of(tmp_path, 100))
        assert told.value.exit_code == 2
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


def test_what_the_run_is_stands_in_the_first_part_alone(tmp_path):
    """Of ten thousand parts each would hold the names of all parameters."""
    about = {"parameters": [f"layers.{index}.weight (64, 64)" for index in range(400)]}
    folder, names = folder_of(tmp_path, 8), ("shard-0", "own-1")
    for name in names:
        write_part(folder, name, {"checkpoint_at": 8}, Identity("run", "attempt"), names, about)
    assert newest(tmp_path).about == about
    sizes = [len((folder / f"{name}.json").read_bytes()) for name in names]
    assert sizes[1] < sizes[0] - len(json.dumps(about["parameters"]))


def test_numbers_of_another_run_or_start_are_refused(tmp_path):
    write_part(tmp_path, "shard-0", {"role": {"count": 1}}, OURS)
    assert read_numbers(tmp_path, "shard-0", "role", OURS) == {"count": 1}
    for other, said in (({"run": "other"}, "it is of run"), ({"attempt": "other"}, "never finished")):
        with pytest.raises(CheckpointError, match=said):
            read_numbers(tmp_path, "shard-0", "role", OURS._replace(**other))
