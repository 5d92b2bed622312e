"""Allreduce goes on without the ranks that die: with the bits of a resume with fewer workers, every sample once."""

import importlib
import json
import os
import random
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import folder_of
from mpitrain.training.measure import same_model
from tests.mpi.cases import TCP, launch_program
from tests.ranks import ROOT, run_ranks
from tests.sampling import asked_for, sampled

ULFM = ("--with-ft", "ulfm")
DEADLINE_S = 180.0
BENCHMARKS = ROOT / "benchmarks"
CHAOS = BENCHMARKS / "chaos"

CODECS = {
    "full": "",
    "normed": "",  # running statistics: those of rank 0, which steps as often as the others
    "threshold": "codec=threshold(density=0.1,dense_below=0)",
    "asking": "codec=threshold(density=0.1,dense_below=0)",
    "powersgd": "codec=powersgd(rank=1,warmup_steps=2)",
}
WHO = {"undisturbed": (), "all": (0, 1, 2), "first": (0,), "some": (1, 2)}
# who hears of the death decides without a codec; each of the others is there with whom it has more to do
SAMPLE = [("full", "all"), ("full", "first"), ("full", "some"), ("normed", "first"), ("asking", "some")]
SAMPLE += [("threshold", "all"), ("powersgd", "first")]


@pytest.fixture(scope="module")
def alarms(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("alarms")
    asked = asked_for(request, "case") - {None}
    asked |= {(codec, "undisturbed") for codec, _ in asked}
    cases = {f"{codec}-{who}": (CODECS[codec], WHO[who]) for codec, who in sorted(asked)}
    text = json.dumps(cases)
    ended = launch_program(
        3, "told_of_deaths", str(path), text, mpirun_args=ULFM, timeout_s=DEADLINE_S
    ).check()
    missing = [case for case in cases if not (path / case / "model.safetensors").exists()]
    assert not missing, f"{missing} left no model\n{ended}"
    return path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            (codec, who), marks=() if (codec, who) in SAMPLE else pytest.mark.extended, id=f"{codec}-{who}"
        )
        for codec in CODECS
        for who in WHO
        if WHO[who]
    ],
)
def test_a_step_that_nobody_has_finished_is_redone_and_one_that_some_have_is_taken_from_them(alarms, case):
    """No gradient is lost or counted twice, in parameters, momenta or residuals: the bits of the run tell."""
    codec, who = case
    models = [alarms / f"{codec}-{name}" / "model.safetensors" for name in ("undisturbed", who)]
    undisturbed, disturbed = (load_file(model) for model in models)
    for name, tensor in undisturbed.items():
        # rank 0 has lost the step here, and takes it from rank 1 with the running statistics of rank 1's batches
        taken_over = "running" in name and who == "first"
        assert taken_over or torch.equal(tensor, disturbed[name]), name


def train(ranks, path, *, strategy="allreduce()", mpirun_args=(), **changes):
    options = {"every": "never", "resume": None, "inject": (), "watchdog_s": 0.0} | changes
    asked = json.dumps({"path": str(path), "strategy": strategy} | options)
    ended = launch_program(
        ranks, "recovering_run", asked, mpirun_args=mpirun_args, timeout_s=DEADLINE_S
    ).check()
    assert (path / "result.json").exists(), str(ended)
    return json.loads((path / "result.json").read_text())


AVERAGING = "localsgd(period=3,average_optimizer=True,outer=slowmo())"


@pytest.mark.parametrize(
    ("strategy", "step"), sampled([("allreduce()", 7), (AVERAGING, 6)], [(AVERAGING, 6)])
)
def test_who_is_left_goes_on_as_a_resume_with_fewer_workers_does(tmp_path, strategy, step):
    """Rank 0 dies after 7 steps of 12 samples: what it reported, wrote and validated is the next one's from there."""
    orders, mark = ("kill(worker=0,at_step=6)",), 12 * step
    result = train(3, tmp_path / "killed", strategy=strategy, inject=orders, mpirun_args=ULFM)
    assert (result["lost"], result["samples"], result["fault_tolerance"]) == ({"0": "died"}, 6 * 48, "ulfm")
    assert [(row["step"], row["lost"], row["workers"]) for row in result["recoveries"]] == [(step, [0], 2)]
    assert [detail["rank"] for detail in result["ranks"]] == [1, 2]
    spent = result["goodput"]
    assert spent["samples_useful"] == result["samples"] and sum(spent["seconds"].values()) == spent["wall_s"]
    assert spent["seconds"]["waiting"] > 0 == spent["seconds"]["restart"]
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows if row["event"] == "worker lost"] == [0]
    told = [(row["tick"], row["ticks"]) for row in rows if row["event"] == "schedule"]
    assert told == [("12 -> 8 samples", step)]
    train(3, tmp_path / "whole", strategy=strategy, every=str(mark))
    fewer = tmp_path / "fewer"
    shutil.copytree(folder_of(tmp_path / "whole", mark), folder_of(fewer, mark))
    train(2, fewer, strategy=strategy, resume="auto")
    assert (tmp_path / "killed" / "again" / "result.json").exists()
    assert same_model(tmp_path / "killed" / "model.safetensors", fewer / "model.safetensors")


@pytest.mark.parametrize(
    ("num_bytes", "btl"),
    [
        pytest.param(1_000_000, TCP, marks=pytest.mark.extended),
        (100_000, ()),
        pytest.param(1_000_000, (), marks=pytest.mark.extended),
    ],
)
def test_kills_in_the_middle_of_an_allreduce_lose_no_sample_and_part_no_survivors(
    tmp_path, monkeypatch, num_bytes, btl
):
    """Three of five ranks, at random instants; more of these in `make chaos`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(CHAOS)
    chaos = importlib.import_module("chaos_allreduce")
    orders = chaos.draw_orders(1_000_000, random.Random(num_bytes + len(btl)))
    words = [word for order in orders for word in ("--inject", order)]
    job, run_dir = str(CHAOS / "counted_job.py"), str(tmp_path)
    command = [sys.executable, "-m", "mpitrain", "train", job, "--run-dir", run_dir, "--quiet", *words]
    env = {
        "CHAOS_BYTES": str(num_bytes), "CHAOS_DIR": run_dir, "CHAOS_SAMPLES": str(chaos.NUM_SAMPLES),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCHMARKS}",
    }  # fmt: skip
    ended = run_ranks(chaos.RANKS, command, env=env, mpirun_args=(*ULFM, *btl), timeout_s=DEADLINE_S).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["lost"]) == chaos.VICTIMS and result["status"] == "ok", str(ended)
    assert chaos.account(tmp_path) == []


def test_an_exception_is_no_death_and_ends_the_job(tmp_path):
    """The others would meet it, too: the bits that they agree on say that one of them does not want to go on."""
    asked = ("raise", str(tmp_path))
    ended = launch_program(4, "ending_run", *asked, mpirun_args=ULFM, timeout_s=DEADLINE_S)
    assert not (tmp_path / "result.json").exists()
    assert "rank 1 (worker, step 1): RuntimeError: planted" in ended.stderr
    assert ended.code != 0 and "recovered" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_rank_that_validates_may_die_in_it(tmp_path):
    asked = ("validation", str(tmp_path))
    launch_program(3, "ending_run", *asked, mpirun_args=ULFM, timeout_s=DEADLINE_S).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["lost"], result["samples"]) == ("ok", {"0": "died"}, 48)
    assert "validation_loss" in result["metrics"] and load_file(result["model"])


def test_a_rank_that_is_stuck_ends_itself_and_the_others_go_on(tmp_path):
    orders = ("segv(worker=2,at_step=1)", "wedge(worker=1,at_step=3)")
    result = train(4, tmp_path, inject=orders, watchdog_s=12.0, mpirun_args=ULFM)
    assert (result["lost"], result["samples"]) == ({"1": "died", "2": "died"}, 6 * 48)
    assert "self_destruct.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()
