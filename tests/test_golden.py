"""Golden runs: a recording names the run and the part that differ, and leaves out what is left to chance."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mpitrain.values import names, parse
from tests.golden.__main__ import chosen, differences, line, read
from tests.golden.digests import checkpoint_parts, parts_of
from tests.golden.runs import FEATURES, MPI, THREADS, VIRTUAL, all_runs


def written(path, **changes):
    """What a run leaves, with these changes."""
    given = {
        "bit": 0.0,
        "wall_s": 1.0,
        "steps": 3,
        "virtual_s": 2.0,
        "loss": 0.5,
        "state": {"cursor": 4},
    } | changes
    folder = path / json.dumps(changes) / "checkpoints" / "000000000012"
    folder.mkdir(parents=True)
    run_dir = folder.parents[1]
    save_file({"weight": torch.tensor([given["bit"], 1.0])}, run_dir / "model.safetensors")
    row = {
        "event": "validation",
        "time": str(run_dir),
        "t": given["wall_s"],
        "validation_loss": given["loss"],
    }
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    result = {key: given[key] for key in ("wall_s", "steps", "virtual_s")} | {"run_dir": str(run_dir)}
    (run_dir / "result.json").write_text(json.dumps(result))
    record = {
        "state": given["state"],
        "run": str(run_dir),
        "about": {"loss": f"loss@{given['wall_s']:012.0f}"},
    }
    (folder / "shard-0.json").write_text(json.dumps(record))
    save_file({"0": torch.tensor([given["bit"]])}, folder / "shard-0.safetensors")
    return parts_of(run_dir, is_virtual=True)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"bit": -0.0}, "model, checkpoints' tensors"),
        ({"steps": 4}, "counts"),
        ({"loss": 0.25}, "validations"),
        ({"virtual_s": 3.0}, "clock"),
        ({"state": {"cursor": 5}}, "checkpoints' records"),
        ({"wall_s": 9.0}, ""),
    ],
)
def test_what_differs_is_named_and_what_is_left_to_chance_is_not(changes, parts, tmp_path):
    before, after = written(tmp_path), written(tmp_path, **changes)
    assert differences({"run": before}, {"run": after}) == ([f"run: {parts}"] if parts else [])


def test_the_order_of_first_arrival_changes_nothing_and_another_tensor_does(tmp_path):
    def digests(name, pairs, tensors):
        folder = tmp_path / name / "checkpoints" / "000000000012"
        folder.mkdir(parents=True)
        record = {"state": {"__pairs__": [[worker, {"__tensor__": tensor}] for worker, tensor in pairs]}}
        (folder / "shard-0.json").write_text(json.dumps(record))
        save_file(
            {key: torch.tensor([value]) for key, value in tensors.items()}, folder / "shard-0.safetensors"
        )
        return checkpoint_parts(tmp_path / name)

    first = digests("first", [(1, "0"), (2, "1")], {"0": 1.0, "1": 2.0})
    assert digests("second", [(2, "0"), (1, "1")], {"0": 2.0, "1": 1.0}) == first
    other = digests("other", [(1, "1"), (2, "0")], {"0": 1.0, "1": 2.0})
    assert [name for name in first if other[name] != first[name]] == ["checkpoints' tensors"]


def test_a_recording_is_read_as_it_was_written(tmp_path):
    (tmp_path / "file").write_text(line("a | b=c", {"model": "0123456789abcdef", "nothing": ""}) + "\n")
    assert read(tmp_path / "file") == {"a | b=c": {"model": "0123456789abcdef", "nothing": ""}}
    assert differences({"old": {}}, {"new": {}}) == ["new: not recorded", "old: did not run"]


def test_every_family_and_every_feature_are_run_in_every_world():
    runs = all_runs()
    for world in (VIRTUAL, THREADS, MPI):
        of_world = [run for run in runs if run.world == world]
        split = {"pipeline", "tensor", "sharded"} if world == THREADS else set()
        assert {parse(run.text, "strategy").name for run in of_world} == set(names("strategy")) - split
        assert {run.feature for run in of_world} == set(FEATURES)
    places = {run.key: place for place, run in enumerate(runs)}
    assert len(places) == len(runs) and all(places[run.of] < places[run.key] for run in runs if run.of)


def test_with_the_runs_that_are_asked_for_come_those_they_go_on_from():
    runs = chosen(["mpi", "sync(servers=2)", "| adam | resumed"])
    assert {run.of for run in runs} <= {"", *(run.key for run in runs)} and len(runs) > 1
