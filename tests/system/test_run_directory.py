"""Whose a run directory is: a new run makes room, a run that goes on stays, and many writers make room once."""

import json
import os
import resource

import pytest

from mpitrain.checkpoint import newest, write_part
from mpitrain.checkpoint.parts import folder_of
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.placement import Roles
from mpitrain.system.files.run_directory import (
    Identity,
    adopt,
    make_room,
    progress,
    run_of,
    wait_for_room,
    why_no_room,
)
from mpitrain.training.open_run import open_run
from mpitrain.wrapping.checkpoints import LoopRun
from tests import toy


class OneRank:
    """Agreements of a single rank."""

    rank, size, nodes = 0, 1, (0,)

    def broadcast(self, value):
        return json.loads(json.dumps(value))

    def allgather(self, value):
        return [self.broadcast(value)]

    def agree(self, error):
        if error is not None:
            raise error


def opened(run_dir, resume=None):
    overrides = Overrides(run_dir=str(run_dir), resume=resume)
    run = open_run(OneRank(), toy.make_job(strategy=AllReduce()), overrides, Roles((), (0,)))
    run.lock.release()
    return run


def checkpoint(run_dir, mark, identity):
    write_part(folder_of(run_dir, mark), "shard-0", {"role": {}}, identity, ["shard-0"], {})


def test_a_new_run_moves_aside_what_is_there_and_a_run_that_goes_on_does_not(tmp_path):
    """A relaunch of the second run must go on from the second run's checkpoint, however far the first has come."""
    first = opened(tmp_path)
    assert first.resume is None and first.events == ()
    (tmp_path / "run.json").write_text(json.dumps({"run": first.identity.run}))
    for name in ("metrics.jsonl", "restarts.jsonl", "result-1.json", "hosts", "mine.txt"):
        (tmp_path / name).write_text("{}\n")
    checkpoint(tmp_path, 5000, first.identity)
    second = opened(tmp_path)
    earlier = tmp_path / f"earlier-{first.identity.run}"
    assert second.events == (("earlier run moved aside", {"to": str(earlier)}),)
    assert second.identity.run != first.identity.run and second.identity.resumed_from is None
    kept = {"checkpoints", "run.json", "metrics.jsonl", "restarts.jsonl", "result-1.json"}
    assert {path.name for path in earlier.iterdir()} == kept
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", earlier.name, "hosts", "mine.txt"}
    checkpoint(tmp_path, 640, second.identity)
    third = opened(tmp_path, "auto")
    assert third.resume.checkpoint_at == 640 and third.identity.run == second.identity.run
    assert third.identity.attempt != second.identity.attempt
    assert third.identity.resumed_from == {
        "run": second.identity.run,
        "attempt": second.identity.attempt,
        "checkpoint_at": 640,
        "samples": 640,
    }
    assert opened(tmp_path, str(tmp_path)).identity.run == second.identity.run  # named instead of "auto"


def test_a_run_that_goes_on_from_another_directory_is_a_new_one_that_says_from_where(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    source = Identity("theirs", "a")
    checkpoint(there, 100, source)
    adopt(here, "older")
    checkpoint(here, 7, Identity("older", "b"))
    run = opened(here, str(there))
    assert run.resume.checkpoint_at == 100 and run.identity.run not in ("theirs", "older")
    assert run.identity.resumed_from == {
        "run": "theirs", "attempt": "a", "checkpoint_at": 100, "samples": 100,
    }  # fmt: skip
    assert (
        progress(here).samples == -1
        and progress(here / "earlier-older").samples == 7
        and progress(there).samples == 100
    )
    again = opened(here / "earlier-older", "auto")  # what was moved aside is a run directory itself
    assert (again.resume.checkpoint_at, again.identity.run) == (7, "older")


def test_auto_without_a_whole_checkpoint_begins_the_same_run_anew(tmp_path):
    first = opened(tmp_path, "auto")
    write_part(folder_of(tmp_path, 100), "shard-0", {}, first.identity, ["shard-0", "shard-1"])
    second = opened(tmp_path, "auto")
    assert second.identity.run == first.identity.run and second.resume is None
    assert second.events[0][1]["reason"] == "none was ever finished; the run begins anew"
    assert not list(tmp_path.glob("earlier-*"))


def test_what_is_damaged_beyond_is_no_progress_of_the_next_start(tmp_path):
    """The launcher and batch scripts start a run again only while the newest checkpoint is another one."""
    first = opened(tmp_path)
    for mark in (100, 200):
        checkpoint(tmp_path, mark, first.identity)
    write_part(folder_of(tmp_path, 300), "shard-0", {}, first.identity, ["shard-0", "shard-1"])
    with open(folder_of(tmp_path, 200) / "shard-0.safetensors", "ab") as file:
        file.write(b"x")
    before = progress(tmp_path)
    second = opened(tmp_path, "auto")
    assert before.samples == 200 and second.resume.checkpoint_at == 100 and len(second.resume.refused) == 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "run-id", f"{100:012d}", f"damaged-{200:012d}",
    }  # fmt: skip
    checkpoint(tmp_path, 150, second.identity)
    after = progress(tmp_path)
    assert after != before and (after.samples, after.since, after.gets_on) == (150, 100, True)
    assert newest(tmp_path).checkpoint_at == 150


def version_0_1_0(run_dir, mark):
    from mpitrain.checkpoint.parts import _digest

    path = folder_of(run_dir, mark) / "shard-0.json"
    path.parent.mkdir(parents=True)
    record = {"schema": 1, "part": "shard-0", "needs": ["shard-0"], "about": {}, "num_bytes": 0, "state": {}}
    path.write_text(json.dumps(record | {"self": _digest(record)}))
    return path


def test_a_checkpoint_of_the_first_version_is_refused_with_schema_and_file_and_a_new_run_moves_it(tmp_path):
    path = version_0_1_0(tmp_path, 100)
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(
            UsageError,
            match="shard-0.json was written by an older mpitrain, .* schema 1, and this mpitrain 0.* reads schema 3",
        ) as told:
            opened(tmp_path, resume)
        assert told.value.exit_code == 2 and path.exists()
    with pytest.raises(UsageError, match="no checkpoint there"):
        opened(tmp_path, str(tmp_path / "nowhere"))
    assert path.exists() and not list(tmp_path.glob("earlier-*"))  # a start that is refused changes nothing
    opened(tmp_path)
    assert (
        not path.exists() and len(list(tmp_path.glob(f"earlier-*/checkpoints/{100:012d}/shard-0.json"))) == 1
    )


def test_a_folder_named_checkpoints_that_is_not_ours_stays(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "pretrained.safetensors").write_text("mine")
    run = opened(tmp_path)
    assert run.events == () and run_of(tmp_path) == run.identity.run
    assert (tmp_path / "checkpoints" / "pretrained.safetensors").exists()


def test_an_id_from_a_hostile_directory_leads_nowhere_else(tmp_path):
    run_dir = tmp_path / "run"
    adopt(run_dir, "../../outside")
    checkpoint(run_dir, 5, Identity("..", ".."))
    assert run_of(run_dir) == ""
    make_room(run_dir, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"run"} and run_of(run_dir) == "new"


def test_a_disk_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    checkpoint(tmp_path, 9, Identity("old", "a"))

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        UsageError, match="cannot be written to, .*Read-only file system; give another --run-dir"
    ):
        opened(tmp_path)


def test_recovered_ranks_write_under_a_name_of_their_own_within_the_same_start():
    ours = Identity("run", "a1")
    assert ours.after_losing(0) == ours
    later = ours.after_losing(1).after_losing(3)
    assert later.attempt == "a1.3" and ours.is_same_start(later.attempt) and later.is_same_start("a1")
    assert not ours.is_same_start("a2")


def test_a_loop_of_ones_own_moves_checkpoints_only_and_the_other_workers_wait_for_it(tmp_path, capsys):
    checkpoint(tmp_path, 9, Identity("old", "a"))
    (tmp_path / "metrics.jsonl").write_text("the loop's own")
    loop, other = LoopRun(Identity("new", "b")), LoopRun(Identity("new", "b"))
    assert not wait_for_room(tmp_path, "new", 0.0)
    first = loop.open(tmp_path, 3, first=True)
    assert other.open(tmp_path, 3, first=False) == first == Identity("new", "b")
    assert f"are now in {tmp_path / 'earlier-old'}" in capsys.readouterr().err
    checkpoint(tmp_path, 3, first)
    assert loop.open(tmp_path, 4, first=True) == first and capsys.readouterr().err == ""
    assert progress(tmp_path)[:3] == (3, "new", "b") and (tmp_path / "metrics.jsonl").exists()
    loop.locks[tmp_path].release()
    again = LoopRun(
        Identity("newer", "c", {"run": "new", "attempt": "b", "checkpoint_at": 3}), newest(tmp_path), tmp_path
    )
    with pytest.raises(UsageError, match="step 2 lies before 3, from which this loop goes on"):
        again.open(tmp_path, 2, first=True)
    assert again.open(tmp_path, 4, first=True).run == "new" and progress(tmp_path).samples == 3
    assert again.open(tmp_path / "elsewhere", 1, first=True).run == "newer"
    for lock in again.locks.values():
        lock.release()


def test_whether_there_is_room_for_another_checkpoint(tmp_path):
    checkpoint(tmp_path, 9, Identity("run", "a"))
    assert why_no_room(tmp_path) == "" and why_no_room(tmp_path / "nowhere") == ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, before[1]))
        assert why_no_room(tmp_path) == os.strerror(27)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
