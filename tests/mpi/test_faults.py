"""Workers that die, raise or stop: the run goes on, takes every sample, and says whom it lost."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.mpi import failed_ranks
from mpitrain.mpi.operation import Op
from tests import toy
from tests.mpi.cases import TCP, launch_program

ULFM = ("--with-ft", "ulfm")
DEADLINE_S = 180.0  # of a launch that takes 8 s where the cores are free


def run(path, strategy, faults, ranks=5, epochs=20, width=50, mpirun_args=ULFM, pause_s=1.0, heartbeat_s=0.0):
    """One launch of `programs/faulty_workers.py`: rank -> (how, at which batch or payload, seconds after it)."""
    # so long that only who has stopped can be silent, on a busy machine, too
    heartbeat_s = heartbeat_s or (10.0 if any(how == "stop" for how, *_ in faults.values()) else 60.0)
    asked = {"path": str(path), "strategy": strategy, "faults": faults, "epochs": epochs, "width": width}
    text = json.dumps(asked | {"heartbeat_s": heartbeat_s, "pause_s": pause_s})
    ended = launch_program(ranks, "faulty_workers", text, mpirun_args=mpirun_args, timeout_s=DEADLINE_S)
    assert (path / "result.json").exists(), str(ended)
    return ended, json.loads((path / "result.json").read_text())


def loss_of(model):
    batch = toy.Memory().reader(None, 0).batch(0, 0, 48)
    with torch.no_grad():
        return float(toy.square_loss(model, batch))


def check_complete(result, faults, width=50):
    """Nothing phantom was applied, the identity holds, the model has learned, and whom a fault hit is said, and nobody
    else."""
    assert (result["status"], result["failure"]) == ("ok", "")
    fates = {"stop": "silent", "pause": None}
    expected = {str(rank): fates.get(how, "died") for rank, (how, *_) in faults.items()}
    assert result["lost"] == {rank: fate for rank, fate in expected.items() if fate}
    for detail in result["ranks"]:
        if detail["role"] == "server":
            assert detail["staleness_identity"][0] == detail["staleness_identity"][1]
            assert detail["accepted"] == sum(detail["staleness_histogram"].values())
    torch.manual_seed(0)
    model = toy.wide(width)
    untrained = loss_of(model)
    model.load_state_dict(load_file(result["model"]))
    assert loss_of(model) < 0.8 * untrained  # 0.6 to 0.7 after so few epochs
    assert result["metrics"]["validation_loss"] == pytest.approx(loss_of(model), rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        pytest.param("async(servers=2)", {3: ("kill", 9, None)}, marks=pytest.mark.extended),
        (
            "softsync(updates=2,damping=inverse())",
            {1: ("raise", 9, None)},
        ),  # the validator: somebody inherits
        ("ssp(bound=2)", {2: ("segv", 7, None), 4: ("kill", 20, None)}),
        ("sync()", {2: ("kill", 5, None)}),
    ],
)
def test_a_worker_that_dies_is_not_missed(tmp_path, strategy, faults):
    ended, result = run(tmp_path, strategy, faults)
    check_complete(result, faults)
    assert result["samples"] == 20 * 48
    assert ended.code == 0, ended
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(event["rank"] for event in events if event["event"] == "worker lost") == sorted(faults)


@pytest.mark.parametrize(
    ("width", "btl"), [pytest.param(40_000, TCP, marks=pytest.mark.extended), (3000, TCP), (3000, ())]
)
def test_kills_in_the_middle_of_a_payload_leave_no_phantom_and_no_torn_update(tmp_path, width, btl):
    """Three of four workers, of which the last may die at the same instant; more of these in `make chaos`."""
    draw = random.Random(width)
    faults = {
        rank: ("kill", draw.randrange(2, 8), draw.choice((0.0, 1e-4, 3e-4, 1e-3, 3e-3))) for rank in (1, 2, 3)
    }
    _, result = run(tmp_path, "async()", faults, epochs=8, width=width, mpirun_args=(*ULFM, *btl))
    check_complete(result, faults, width)
    assert result["samples"] == 8 * 48


def test_ranks_that_die_at_once_are_each_told_of():
    """MPI raises one error and turns all failed requests into null ones: none of them may be left among the others."""
    told = launch_program(4, "dies_together", mpirun_args=ULFM)
    assert told.ranks_out[0] == "[True, True, True] 0\n", told


def test_what_waits_for_the_dead_is_given_up_at_the_second_look(monkeypatch):
    """MPI has had its chance to fail it; what waits for the living stays, on every communicator by its own ranks."""

    class Comm:
        def __init__(self, handle, dead):
            self.handle, self.dead = handle, dead

    monkeypatch.setattr(failed_ranks, "failed_ranks", lambda comm: comm.dead)
    monkeypatch.setattr(failed_ranks, "CHECK_EVERY_S", 0.0)
    world, group = Comm(1, set()), Comm(2, set())
    ops = [Op("receive", None, peer) for peer in (1, 2, 2)] + [Op("arrival"), Op("call")]
    for op, comm in zip(ops, (world, world, group, group, None)):
        op.comm = comm
    failed = failed_ranks.FailedRanks()
    assert failed.unanswerable(ops) == []
    world.dead = {2}
    assert failed.unanswerable(ops) == [] and failed.unanswerable(ops) == [ops[1]]
    group.dead = {0}
    assert failed.unanswerable(ops) == [ops[1]] and failed.unanswerable(ops) == [ops[1], ops[3]]


@pytest.mark.parametrize("mpirun_args", [ULFM, pytest.param((), marks=pytest.mark.extended)])
def test_a_worker_that_stops_holds_nobody_up_and_the_run_ends(tmp_path, mpirun_args):
    """No fault-tolerant MPI is needed for this; without one the stopped rank is ended by MPI_Abort at the very end.
    Another one wakes after a second: its late gradient is one like others.
    """
    faults = {2: ("stop", 5, None), 4: ("pause", 7, None)}
    ended, result = run(tmp_path, "async()", faults, mpirun_args=mpirun_args)
    check_complete(result, faults)
    assert result["samples"] == 20 * 48 and ended.code == 0, ended
    assert result["fault_tolerance"] == ("ulfm" if mpirun_args else "restart")


@pytest.mark.parametrize("mpirun_args", [(), pytest.param(ULFM, marks=pytest.mark.extended)])
def test_a_worker_that_was_given_up_at_the_end_and_wakes_is_told_and_the_run_ends(tmp_path, mpirun_args):
    """The servers' roles are over by then, and none of what follows waits for it."""
    faults = {2: ("pause", 7, None)}
    ended, result = run(
        tmp_path, "async(servers=2)", faults, mpirun_args=mpirun_args, pause_s=5.0, heartbeat_s=1.0, epochs=8
    )
    assert (result["status"], result["failure"], result["samples"]) == ("ok", "", 8 * 48)
    assert set(result["lost"].items()) <= {("2", "silent")} and ended.code == 0, ended
    if result["lost"]:  # it has come back before the result was written
        assert [row["rank"] for row in result["ranks"] if row["role"] == "worker"] == [2, 3, 4], result


def test_the_last_worker_cannot_be_done_without(tmp_path):
    _, result = run(tmp_path, "async()", {1: ("kill", 5, None)}, ranks=2)
    assert result["status"] == "fail" and "no other worker is left" in result["failure"]


def test_where_everybody_waits_for_everybody_the_job_ends(tmp_path):
    ended = launch_program(2, "deadlock", str(tmp_path), timeout_s=DEADLINE_S)
    assert ended.code not in (0, 75) and "no progress for 0.5 s" in ended.stderr, ended


def test_a_loop_of_ones_own_goes_on_without_workers_that_die(tmp_path):
    """All gradients are the same, so the mean of any number of workers is, and twelve updates are known to the bit."""
    ended = launch_program(5, "own_loop_with_faults", str(tmp_path), mpirun_args=ULFM, timeout_s=DEADLINE_S)
    assert "planted" in ended.ranks_err[4]
    assert [file.name for file in tmp_path.iterdir()] == ["1.pt"]
    expected = toy.linear_float32()
    for _ in range(12):
        expected.zero_grad()
        toy.linear_loss(expected, {"x": torch.ones(1, 5)}).backward()
        torch.optim.SGD(expected.parameters(), lr=0.125).step()
    for file in tmp_path.iterdir():
        state = torch.load(file, weights_only=True)
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    assert not [line for rank in (0, 1, 3) for line in ended.ranks_err[rank].splitlines()], ended
