"""Ordered stragglers over real ranks: who contributes is exact, a sleeper leaves the core and hears messages."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from tests import toy
from tests.mpi.cases import launch_program


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    path = tmp_path_factory.mktemp("inject")
    return path, launch_program(5, "straggling_runs", str(path)).check()


def result_of(launch, name):
    return json.loads((launch[0] / name / "result.json").read_text())


def steps_of(result):
    return [rank["steps"] for rank in result["ranks"] if rank["role"] == "worker"]


def test_backup_averages_exactly_three_of_four_gradients_in_every_update(launch):
    result = result_of(launch, "backup")
    assert result["inject"] == ["slow(worker=2,factor=30)"]
    assert result["late"] > 0 and result["dropped"] == result["nonfinite"] == 0
    assert result["accepted"] + result["late"] == sum(steps_of(result)) == 16 * 8
    assert result["staleness_histogram"] == {"0": result["accepted"]}
    updates = json.loads((launch[0] / "backup" / "updates.json").read_text())
    assert len(updates) == result["steps"] and sum(count for _, count, _ in updates) == result["accepted"]
    whole = [(workers, count) for workers, count, active in updates if active == 4]
    assert set(whole) == {(3, 3)}
    # only when the data is out and workers have left is an update made of fewer; each holds two leases at most
    assert len(updates) - len(whole) <= 2 * 4 and 3 * len(whole) + 2 * 4 * 3 >= result["accepted"]


def test_while_one_is_paused_the_others_go_on(launch):
    result = result_of(launch, "pause")
    assert result["injected"] == [{"worker": 1, "sleeps": 1, "slept_s": 3.0}]
    steps = steps_of(result)
    # after its fourth gradient the paused worker had one lease left; the others took all there were
    assert steps[1] == 5 and sum(steps) == result["accepted"] == 8 * 8
    assert result["staleness_max"] >= 20  # updates by the others between its reading and its coming back
    left, right = result["staleness_identity"]
    assert left == right


def test_the_same_gradients_stall_in_both_worlds(launch, tmp_path):
    real = result_of(launch, "stall")
    twin = mt.simulate(
        toy.make_job(epochs=6), mt.Sync(), 4, run_dir=str(tmp_path), quiet=True, inject=real["inject"]
    )
    assert twin["injected"] == real["injected"] and sum(row["sleeps"] for row in real["injected"]) > 2
    assert steps_of(real) == [12, 12, 12, 12]


def test_allreduce_sleeps_too_and_its_bits_are_the_same(launch):
    plain, slowed = result_of(launch, "plain"), result_of(launch, "slowed")
    one, other = (load_file(result["model"]) for result in (plain, slowed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert plain["steps"] == slowed["steps"] and plain["injected"] == []
    rows = {row["worker"]: row for row in slowed["injected"]}
    assert rows.keys() == {0, 1, 4}
    assert rows[0] == {"worker": 0, "sleeps": 1, "slept_s": 0.5}
    assert rows[1]["sleeps"] == rows[4]["sleeps"] == slowed["steps"]
    for worker, row in rows.items():
        assert slowed["ranks"][worker]["compute_s"] >= row["slept_s"]
    # rank 1 waits in its backward for the pause of rank 0 and for rank 4: what it waited is not slowed again
    assert rows[1]["slept_s"] < rows[0]["slept_s"] + rows[4]["slept_s"]


def test_what_a_straggler_takes_before_a_validation_is_training_and_no_pause(launch):
    result = result_of(launch, "validated")
    assert [row["sleeps"] for row in result["injected"]] == [result["steps"]]
    # the next step waits for every sleep, whether a validation stands between them or not
    most = result["samples"] / result["steps"] / 0.1
    assert result["samples_per_second"] < 1.5 * most


def test_a_wrong_order_is_refused_by_all_ranks_together(launch):
    told = launch[1].ranks_err[0]
    assert "there is no worker 4. This run has 4 workers, 0 to 3" in told
    assert "cannot read inject text" in told
    assert (
        "the ranks were started differently" in told
        and "inject: ['slow(worker=1,factor=2)'] on rank 0" in told
    )


def test_a_sleeper_leaves_the_core_and_messages_still_arrive(tmp_path):
    out = launch_program(2, "sleeper", str(tmp_path / "sent")).check().ranks_out[0].split()
    naps, slept_s, core_s, was_sent, num_bytes = (
        int(out[1]),
        float(out[3]),
        float(out[5]),
        out[7],
        int(out[9]),
    )
    assert slept_s >= 0.25 * naps
    assert core_s < slept_s / 2  # a wait that spins takes all of it
    assert was_sent == "True" and num_bytes > 8_000_000
