"""`--inject` of faults on real ranks: the same names as in virtual time, and the same outcome."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import newest
from tests import toy
from tests.mpi.cases import launch_program

DEADLINE_S = 180.0


def run(path, orders, ranks, every="never", strategy="async()", **options):
    # so long that only who has stopped can be silent, on a busy machine, too
    heartbeat_s = 10.0 if any(order.startswith(("stop", "wedge")) for order in orders) else 60.0
    asked = {"path": str(path), "orders": orders, "every": every, "strategy": strategy}
    asked["heartbeat_s"] = heartbeat_s
    ended = launch_program(ranks, "injected_faults", json.dumps(asked), timeout_s=DEADLINE_S, **options)
    told = path / "result.json"
    return ended, json.loads(told.read_text()) if told.exists() else None


def test_workers_that_break_in_every_way_are_survived_under_ulfm(tmp_path):
    ways = ("kill", "segv", "raise", "exit", "stop", "wedge")
    orders = [f"{how}(worker={worker},at_step={1 + worker % 2})" for worker, how in enumerate(ways)]
    ended, result = run(tmp_path, orders, 9, mpirun_args=("--with-ft", "ulfm"))
    assert result is not None and (result["status"], result["failure"]) == ("ok", ""), ended
    assert result["samples"] == 10 * 48 and result["inject"] == orders
    left, right = result["staleness_identity"]
    assert left == right
    lost = {way: result["lost"].pop(str(1 + worker), None) for worker, way in enumerate(ways)}
    # of one that exits MPI tells, or not in time
    assert lost.pop("exit") in ("died", "silent") and result["lost"] == {}
    assert lost == {"kill": "died", "segv": "died", "raise": "died", "stop": "silent", "wedge": "silent"}


def test_a_validator_that_dies_when_all_is_pushed_is_followed_by_the_next_worker(tmp_path):
    ended, result = run(
        tmp_path, ["kill_at_end(worker=0)", "kill_at_end(worker=1)"], 6, strategy="sync(servers=2)",
        mpirun_args=("--with-ft", "ulfm"),
    )  # fmt: skip
    assert result is not None and (result["status"], result["failure"]) == ("ok", ""), ended
    assert result["samples"] == 10 * 48 and result["lost"] == {"2": "died", "3": "died"}
    model = toy.perceptron()
    model.load_state_dict(load_file(result["model"]))
    with torch.no_grad():
        loss = toy.square_loss(model.eval(), toy.Memory().reader(None, 0).batch(0, 0, 48))
    assert result["metrics"]["validation_loss"] == pytest.approx(float(loss), rel=1e-4) and ended.code == 0


def test_faults_of_gradients_and_files_are_counted_and_the_run_goes_on(tmp_path):
    """A worker whose gradients are not finite ten times in a row is done without, and leaves in order."""
    orders = ["nan(worker=0,at_step=2)", "disk_full()", "corrupt_file(at_write=2)"]
    orders += [f"nan(worker=1,at_step={step})" for step in range(2, 12)]
    ended, result = run(tmp_path, orders, 3, every="96")
    ended.check()
    assert (result["status"], result["nonfinite"], result["lost"]) == ("ok", 11, {"2": "not finite"})
    assert all(2**26 < row["peak_bytes"] < 2**33 for row in result["ranks"])  # of what imports torch
    cost = result["ranks"][0]["checkpoints"]
    assert cost["num_failed"] == 1 and cost["num_written"] >= 3
    assert "cannot write checkpoint part" in ended.stdout and not list(tmp_path.glob("checkpoints/*/.*.tmp"))
    folders = sorted((tmp_path / "checkpoints").iterdir())
    whole = [folder for folder in folders if (folder / "shard-0.json").exists()]
    assert len(whole) == cost["num_written"]
    for folder in whole[2:]:
        for file in folder.iterdir():
            file.unlink()
    found = newest(tmp_path)  # the third write, the second whole one, has a flipped bit
    assert found is not None and found.folder == whole[0] and "is damaged" in " ".join(found.refused)


def test_a_torn_payload_is_an_error_and_never_an_update(tmp_path):
    ended, result = run(tmp_path, ["torn(worker=0,at_step=2)"], 2)
    assert ended.code == 1 and result is None
    assert "payload of rank 1 is torn: stamps" in ended.stderr
