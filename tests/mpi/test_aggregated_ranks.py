"""Aggregators over real ranks, on two nodes: servers, counts, checkpoints and signals as without them.

One launch of `programs/aggregated_runs.py` makes all runs, each into a folder of its name.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import toy
from tests.mpi.cases import launch_program


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openmpi")
    launch_program(7, "aggregated_runs", str(folder)).check()
    return folder


@pytest.fixture(scope="module")
def mpich_path(tmp_path_factory):
    """Of the first runs alone."""
    folder = tmp_path_factory.mktemp("mpich")
    launch_program(7, "aggregated_runs", str(folder), "short", mpi="mpich").check()
    return folder


@pytest.fixture(params=["path", pytest.param("mpich_path", marks=pytest.mark.extended)])
def either_path(request):
    return request.getfixturevalue(request.param)


def result_of(path):
    return json.loads((path / "result.json").read_text())


def rows_of(result, role):
    return [row for row in result["ranks"] if row["role"] == role]


@pytest.mark.parametrize("index", range(len(toy.DYADIC)))
def test_sums_are_serial_training_with_the_full_batch_bit_for_bit(either_path, index):
    changes = list(toy.DYADIC.values())[index] | {"epochs": 1}
    expected, run = toy.serial(toy.make_job(**changes, batch_size=16)), either_path / f"sync-{index}"
    trained, result = load_file(run / "model.safetensors"), result_of(run)
    assert all(torch.equal(trained[name], tensor) for name, tensor in expected.items())
    assert (result["workers"], result["servers"], result["aggregators"], result["nodes"]) == (4, 1, 2, 2)
    assert (result["steps"], result["accepted"], result["staleness_max"]) == (3, 12, 0)
    assert [row["rank"] for row in rows_of(result, "aggregator")] == [2, 6]
    assert [(row["pushes"], row["sums"]) for row in rows_of(result, "aggregator")] == [(6, 3), (6, 3)]


@pytest.mark.parametrize(("name", "epochs"), [("async", 5), ("softsync", 3)])
def test_what_is_passed_on_is_counted_singly(either_path, name, epochs):
    result = result_of(either_path / name)
    (shard,) = rows_of(result, "server")
    assert result["status"] == "ok" and shard["samples_accepted"] == epochs * 48
    assert shard["accepted"] == sum(shard["staleness_histogram"].values()) == epochs * 8
    assert sum(row["steps"] for row in rows_of(result, "worker")) == epochs * 8
    left, right = shard["staleness_identity"]
    assert left == right
    assert sum(row["pushes"] for row in rows_of(result, "aggregator")) == epochs * 8


def test_a_checkpoint_goes_on_with_aggregators_and_without(path):
    """The loss is linear: its gradients are the same wherever the parameters are."""
    whole = load_file(path / "whole" / "model.safetensors")
    for name in ("to-summed", "to-direct"):
        trained, result = load_file(path / name / "model.safetensors"), result_of(path / name)
        assert all(torch.equal(trained[key], tensor) for key, tensor in whole.items()), name
        assert (result["status"], result["samples"]) == ("ok", 6 * 48)
        assert 0 < result["resumed_from"] < 6 * 48


def test_whoever_is_asked_to_end_the_run_ends_with_a_checkpoint_and_goes_on(path):
    """An aggregator, and a worker behind one."""
    asked = result_of(path / "asked-4")
    assert (asked["status"], asked["exit_code"]) == ("requeue", 75) and 0 < asked["samples"] < 40 * 48
    again = result_of(path / "asked-2")
    assert 0 < again["resumed_from"] < 40 * 48
    assert (again["status"], again["samples"]) == ("ok", (again["resumed_from"] // 48 + 2) * 48)
