"""What a run does when something is wrong: it says whose fault it is, where, and what to do, and it ends. It
never hangs.
"""

import json
import runpy
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mpitrain.data.write.shard_file import write_shard
from tests.mpi.cases import PROGRAMS, launch_program
from tests.ranks import ROOT, run_ranks, warm_environment
from tests.sampling import sampled

MPITRAIN = [sys.executable, "-m", "mpitrain"]


def job(name):
    return str(PROGRAMS / f"{name}.py")


def train(n, job, tmp_path, *options, **launch):
    argv = [*MPITRAIN, "train", job, "--run-dir", str(tmp_path / "run"), "--quiet", *options]
    return run_ranks(n, argv, **launch)


def test_an_exception_in_the_job_file_on_one_rank(tmp_path):
    run = train(3, job("failing_job"), tmp_path, env={"JOB_RANK": "1"})
    assert run.code == 1, str(run)
    assert "rank 1: KeyError: 'planted in the job file'" in run.stderr and "failing_job.py" in run.stderr
    assert "FOM" not in run.stdout


@pytest.mark.parametrize(("strategy", "ranks"), [("allreduce", 3), ("async", 3), ("allreduce", 1)])
def test_an_exception_in_the_loss_on_one_rank(tmp_path, strategy, ranks):
    bad = ranks - 1
    run = train(ranks, job("failing_job"), tmp_path, "--strategy", strategy, env={"LOSS_RANK": str(bad)})
    assert run.code == 1, str(run)
    assert f"rank {bad} (worker, step 1): RuntimeError: planted in the loss" in run.stderr
    assert json.loads((tmp_path / "run" / "errors" / f"rank-{bad}.json").read_text())["step"] == 1


def test_an_exception_inside_a_server(tmp_path):
    run = train(4, job("failing_job"), tmp_path, "--strategy", "async(servers=2)", env={"SERVER_RANK": "1"})
    assert run.code == 1, str(run)
    assert "rank 1 (server, step 3): RuntimeError: planted in the server" in run.stderr


def test_an_exception_on_a_worker_under_ulfm_is_its_own_end_and_the_others_go_on(tmp_path):
    launch = {"mpirun_args": ("--with-ft", "ulfm"), "env": {"LOSS_RANK": "2"}}
    run = train(4, job("failing_job"), tmp_path, "--strategy", "async", **launch)
    assert "rank 2 (worker, step 1): RuntimeError: planted in the loss" in run.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "ok" and result["lost"] == {"2": "died"}


def test_ranks_started_with_different_options(tmp_path):
    common = [*MPITRAIN, "train", job("failing_job"), "--run-dir", str(tmp_path / "run"), "--quiet"]
    words = [*common, "--lr", "0.5", ":", "-n", "2", *common, "--lr", "0.25", "--epochs", "3"]
    run = run_ranks(1, words, env=warm_environment({"PYTHONPATH": str(ROOT)}, tmp_path / "ranks"))
    assert run.code == 2, str(run)
    assert run.stderr.count("the ranks were started differently") == 1
    assert "lr: 0.5 on rank 0; 0.25 on ranks 1-2" in run.stderr
    assert "epochs: 2 on rank 0; 3 on ranks 1-2" in run.stderr


def test_a_job_file_without_a_job_and_a_missing_one(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("jobs = 3\n")
    run = train(2, str(path), tmp_path)
    assert run.code == 2 and "all ranks: UsageError" in run.stderr and "no 'job'" in run.stderr, str(run)


@pytest.mark.parametrize(
    "strategy",
    sampled(["allreduce()", "async()", "localsgd(period=2)", "decentralized()"], ["allreduce()", "async()"]),
)
def test_a_batch_key_that_does_not_exist_is_told_once(tmp_path, strategy):
    for _ in range(2):  # in the same run directory: it is news again
        run = train(3, job("asks_for_a_wrong_key"), tmp_path, "--strategy", strategy)
        assert run.code == 2, str(run)
        assert run.stderr.count("loss asks for 'image'") == 1 and "Traceback" not in run.stderr, str(run)
        assert f"({job('asks_for_a_wrong_key')}, line 7), and a batch holds 'x', 'y'" in run.stderr


def test_parameters_that_the_loss_leaves_out_are_found_and_left_alone(tmp_path):
    """As in plain torch: no gradient, so no weight decay either. BatchNorm sees the first batch once."""
    models = {}
    for name, env in {"found": {}, "announced": {"FIND": "yes"}}.items():
        train(2, job("leaves_parameters_out"), tmp_path, env=env).check()
        models[name] = load_file(tmp_path / "run" / "model.safetensors")
        shutil.rmtree(tmp_path / "run")
    assert all(torch.equal(tensor, models["announced"][name]) for name, tensor in models["found"].items())
    torch.manual_seed(0)
    initial = runpy.run_path(job("leaves_parameters_out"))["job"].model().state_dict()
    assert torch.equal(models["found"]["other.weight"], initial["other.weight"])
    assert not torch.equal(models["found"]["head.weight"], initial["head.weight"])
    assert models["found"]["norm.num_batches_tracked"] == 2 * 48 / 12


def test_a_step_that_leaves_out_more_than_the_first_is_told_at_once(tmp_path):
    run = train(2, job("leaves_parameters_out"), tmp_path, env={"SOMETIMES": "yes"})
    assert run.code == 2 and run.stderr.count("does not depend on other.weight") == 1, str(run)
    assert "rank 1 (worker, step 2): UsageError" in run.stderr and "Traceback" not in run.stderr
    assert "Job(find_unused_parameters=True)" in run.stderr
    train(2, job("leaves_parameters_out"), tmp_path, env={"SOMETIMES": "yes", "FIND": "yes"}).check()


SAID = {
    "too few ranks": "3 server(s) on 3 rank(s) leave no worker: start at least 4 ranks",
    "too many workers": "2 workers for 1 training samples: start at most 1",
    "layerwise": "optimizer Layerwise cannot run on a parameter server",
    "no shard": "none/train-*.h5",
    "no synthetic": "--synthetic: the job has no synthetic=",
    "wrong rate": "--lr must be finite and not negative, got -1.0",
    "other model": "parameters: ",
    "run dir": "cannot make the run directory",
    "truncated": "truncated.h5: is truncated",
    "other rate": "lr: 0.5 on rank 0; 0.25 on rank 1",
    "other code": "mpitrain: '0",
}


def damaged_shards(path):
    """One that is too short, and one with a flipped bit among its samples, as all others see it only when they read."""
    shard = path / "flipped.h5"
    write_shard(
        shard, {"x": np.ones((48, 5), np.float32), "y": np.ones((48, 1), np.float32)}, np.arange(48), 8
    )
    with h5py.File(shard) as file:
        offset = file["x"].id.get_chunk_info(3).byte_offset
    data = bytearray(shard.read_bytes())
    (path / "truncated.h5").write_bytes(data[:-1])
    data[offset + 5] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("mpi", "end", "code", "said"),
    [
        (
            "openmpi",
            "flipped",
            2,
            "flipped.h5: dataset 'x', chunk 3 (samples 24 to 31) fails its fletcher32 checksum",
        ),
        pytest.param(
            "mpich",
            "raise",
            1,
            "rank 2 (worker, step 0): RuntimeError: planted in the loss",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_wrong_input_is_said_once_and_all_ranks_leave_together(tmp_path, mpi, end, code, said):
    """And what is found in the middle of a run ends the job with the code that it has."""
    (tmp_path / "file").write_text("")
    damaged_shards(tmp_path)
    run = launch_program(3, "wrong_input", str(tmp_path), end, mpi=mpi)
    assert run.code == code and said in run.stderr, str(run)
    told = dict(part.split("\n", 1) for part in run.ranks_err[0].split("== ")[1:])
    del told["end"]
    assert told.keys() == SAID.keys()
    for name, text in SAID.items():
        assert text in told[name], told[name]
        assert "code 2" in told[name] and "trained" not in told[name]
        assert told[name].count("UsageError") + told[name].count("DataError") == 1, told[name]
    for other in run.ranks_err[1:]:  # only rank 0 speaks
        wrong = other.split("== end")[0]
        assert wrong.count("code 2") == len(SAID) and "Error" not in wrong


@pytest.mark.parametrize(
    ("strategy", "metric", "code"),
    [("allreduce", "accuracy", 3), ("allreduce", "acuracy", 2), ("sharded", "acuracy", 2)],
)
def test_a_missed_target_is_status_missed_and_exit_code_3_and_one_of_a_wrong_name_2(
    tmp_path, strategy, metric, code
):
    run = train(2, job("misses_its_target"), tmp_path, "--strategy", strategy, env={"METRIC": metric})
    assert run.code == code, str(run)
    if code == 3:
        assert "status=missed" in run.stdout.strip().splitlines()[-1]
        assert (tmp_path / "run" / "model.safetensors").exists()
    else:
        wrong = "UsageError: target 'acuracy': validation reports no metric of that name; it reports accuracy, valid"
        assert run.stderr.count(wrong) == 1 and "Traceback" not in run.stderr, str(run)
        assert not (tmp_path / "run" / "model.safetensors").exists()  # after the first of three epochs
