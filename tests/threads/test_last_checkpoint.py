"""The end of a run: what more epochs go on from, and that counts are counts, not names of checkpoints."""

import json

import pytest

import mpitrain as mt
from mpitrain.checkpoint.parts import listed, newest
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from tests import toy
from tests.threads.test_own_state import Queue


def train(path, strategy, **options):
    fields = {"checkpoint_every": "auto", "epochs": 1, "data": toy.Memory(48), "model": lambda: toy.wide(4)}
    fields["optimizer"] = toy.sgd
    fields |= {
        name: options.pop(name)
        for name in ("checkpoint_every", "model", "optimizer", "patience", "epochs")
        if name in options
    }
    job = toy.make_job(**fields)
    options = {"threads": 2, **options}
    return mt.train(job, parse(strategy, "strategy"), run_dir=str(path), quiet=True, **options)


def events(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


OWN = {"model": Queue, "optimizer": toy.hooked}  # buffers that train, hooks


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ("allreduce()", {}),
        ("sync()", {}),
        ("sync(servers=2)", OWN),
        ("sync(servers=2,optimizer='worker')", {}),
        ("localsgd(period=2)", {}),
        ("decentralized()", {}),
    ],
)
def test_more_epochs_go_on_from_the_end_of_a_short_run(strategy, fields, tmp_path):
    first = train(tmp_path / "a", strategy, **fields)
    more = train(tmp_path / "a", strategy, epochs=2, resume="auto", **fields)
    assert (first["samples"], more["samples"], more["resumed_from"], more["leg"]) == (48, 96, 48, 2)
    whole = train(tmp_path / "b", strategy, epochs=2, **fields)
    assert same_model(whole["model"], more["model"])
    again = train(tmp_path / "a", strategy, epochs=2, resume="auto", **fields)  # nothing is left to do
    assert (again["samples"], again["leg_samples"], again["leg"]) == (96, 0, 3)
    assert again["steps"] == more["steps"] == whole["steps"]
    assert same_model(whole["model"], again["model"])


@pytest.mark.parametrize(
    "strategy", ["async(servers=2)", "elastic(servers=2)", "decentralized(asynchronous=True)"]
)
def test_the_end_is_written_where_nobody_waits_for_anybody(strategy, tmp_path):
    train(tmp_path, strategy)
    more = train(tmp_path, strategy, epochs=2, resume="auto")
    assert (more["samples"], more["resumed_from"], more["leg_samples"]) == (96, 48, 48)
    rows = [row for row in events(tmp_path) if "checkpoint" in row["event"]]
    assert [(row["event"], row["samples"]) for row in rows] == [("checkpoint", 48), ("checkpoint", 96)]


def test_a_run_says_where_its_newest_checkpoint_lies_before_its_end(tmp_path):
    """Four steps and an averaging out of turn, after a checkpoint at the third."""
    result = train(tmp_path, "localsgd(period=3)", checkpoint_every="30")
    rows = [row["samples"] for row in events(tmp_path) if row["event"] == "newest checkpoint"]
    assert result["samples"] == 48 and rows == ["36 of 48"]


def test_a_run_that_ended_without_a_checkpoint_is_moved_aside_and_named(tmp_path):
    first = train(tmp_path, "sync()", checkpoint_every="never")
    assert not listed(tmp_path)
    (said,) = [row["reason"] for row in events(tmp_path) if row["event"] == "no checkpoint"]
    assert said == "checkpoint_every='never', so more epochs would begin anew"
    before = (tmp_path / "model.safetensors").read_bytes()
    more = train(tmp_path, "sync()", epochs=2, resume="auto")
    rows = [row for row in events(tmp_path) if row["event"] in ("no checkpoint", "earlier run moved aside")]
    assert [row["event"] for row in rows] == ["no checkpoint", "earlier run moved aside"]
    assert (tmp_path / f"earlier-{first['run']}" / "model.safetensors").read_bytes() == before
    assert more["run"] != first["run"] and more["samples"] == 96


def test_samples_are_those_that_were_accepted_whatever_a_checkpoint_is_called(tmp_path):
    """A checkpoint that is due in the middle of an update holds all of it."""
    train(tmp_path, "sync()", checkpoint_every="20", model=toy.normed, steps=2)
    found = newest(tmp_path)
    assert (found.checkpoint_at, found.num_samples()) == (20, 24)
    again = train(tmp_path, "sync()", checkpoint_every="20", model=toy.normed, steps=2, resume="auto")
    assert (again["samples"], again["leg_samples"]) == (24, 0)
    assert [row["samples"] for row in events(tmp_path) if row["event"] == "resume"] == [24]


@pytest.mark.parametrize(("first", "then"), [(3, 1), (1, 3)])
def test_steps_that_are_left_are_steps_of_the_workers_that_are_there_now(first, then, tmp_path):
    begun = train(tmp_path, "sync()", threads=first, steps=3)
    more = train(tmp_path, "sync()", threads=then, steps=6, resume="auto")
    assert (begun["steps"], begun["samples"], more["steps"]) == (3, 48 if first == 3 else 18, 6)
    assert more["leg_samples"] == (3 * 6 if then == 1 else 18 + 12 + 18)
