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
from tests.ranks import ROOT, run_ranks

ULFM = ("--with-ft", "ulfm")
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
DEADLINE_S = 180.0
BENCHMARKS = ROOT / "benchmarks"

# Nobody dies: some ranks are only told so, in the middle of a step, and the others hear of it from them.
ALARM = """
import gc
from torch.nn.parallel import DistributedDataParallel
import mpitrain as mt
from mpitrain.mpi.faults.shrink import process_failed
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from mpitrain.strategies.checkpoint_policy import Cadence
from mpitrain.training.synchronous.stepper import Stepper
from tests import toy

runtime = start()
update, alarmed, met = Stepper.update, (), set()

def alarming(self, value, share, count):
    # the allreduce is done everywhere: who is not alarmed takes the step, the others have lost it
    if self.step == 5 and runtime.rank in alarmed and name not in met:
        met.add(name)
        raise process_failed()
    loss = update(self, value, share, count)
    if self.step == 7 and name in met:  # the trainers before this one are gone, and with them DDP's hooks
        gc.collect()
        assert sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects()) == 1
    return loss

Stepper.update, seldom = alarming, Cadence.steps_to_next_question
for name, (codec, alarmed) in {cases!r}.items():
    # the others hear of the loss in the next step, or between two steps, where they ask who has to end
    Cadence.steps_to_next_question = (lambda *_: 1) if name.startswith("asking") else seldom
    model = toy.normed if name.startswith("normed") else toy.perceptron
    job = toy.make_job(model=model, epochs=6, batch_size=4, checkpoint_every="never")
    result = mt.train(
        job, parse(f"allreduce({{codec}})", "strategy"), run_dir=f"{path}/{{name}}", quiet=True, watchdog_s=0.0
    )
    assert result["exit_code"] == 0 and result["lost"] == {{}}, result
    assert [row["step"] for row in result["recoveries"]] == {{(): [], (0, 1, 2): [5]}}.get(alarmed, [6]), result
"""
CODECS = {
    "full": "",
    "normed": "",  # running statistics: those of rank 0, which steps as often as the others
    "threshold": "codec=threshold(density=0.1,dense_below=0)",
    "asking": "codec=threshold(density=0.1,dense_below=0)",
    "powersgd": "codec=powersgd(rank=1,warmup_steps=2)",
}
WHO = {"undisturbed": (), "all": (0, 1, 2), "first": (0,), "some": (1, 2)}


@pytest.fixture(scope="module")
def alarms(tmp_path_factory):
    path = tmp_path_factory.mktemp("alarms")
    cases = {f"{codec}-{who}": (CODECS[codec], WHO[who]) for codec in CODECS for who in WHO}
    run_ranks(3, ALARM.format(cases=cases, path=path), mpirun_args=ULFM, timeout_s=DEADLINE_S).check()
    return path


@pytest.mark.parametrize("who", ["all", "first", "some"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_step_that_nobody_has_finished_is_redone_and_one_that_some_have_is_taken_from_them(
    alarms, codec, who
):
    """No gradient is lost or counted twice, in parameters, momenta or residuals: the bits of the run tell."""
    models = [alarms / f"{codec}-{name}" / "model.safetensors" for name in ("undisturbed", who)]
    undisturbed, disturbed = (load_file(model) for model in models)
    for name, tensor in undisturbed.items():
        # rank 0 has lost the step here, and takes it from rank 1 with the running statistics of rank 1's batches
        taken_over = "running" in name and who == "first"
        assert taken_over or torch.equal(tensor, disturbed[name]), name


RUN = """
import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

job = toy.make_job(epochs=6, batch_size=4, checkpoint_every="{every}", keep_checkpoints=99, validate=toy.Memory())
result = mt.train(
    job, parse("{strategy}", "strategy"), run_dir="{path}", quiet=True, resume={resume!r}, inject={inject!r},
    watchdog_s={watchdog_s},
)
start().exit_code = result["exit_code"]
if result.get("lost"):  # those that are left may train again
    again = mt.train(toy.make_job(checkpoint_every="never"), mt.AllReduce(), run_dir="{path}/again", quiet=True)
    assert (again["workers"], again["samples"], again["lost"]) == (start().size, 2 * 48, {{}}), again
"""


def train(ranks, path, *, strategy="allreduce()", mpirun_args=(), **changes):
    options = {"every": "never", "resume": None, "inject": (), "watchdog_s": 0.0} | changes
    script = RUN.format(path=path, strategy=strategy, **options)
    ended = run_ranks(ranks, script, mpirun_args=mpirun_args, timeout_s=DEADLINE_S).check()
    assert (path / "result.json").exists(), str(ended)
    return json.loads((path / "result.json").read_text())


AVERAGING = "localsgd(period=3,average_optimizer=True,outer=slowmo())"


@pytest.mark.parametrize(("strategy", "step"), [("allreduce()", 7), (AVERAGING, 6)])
def test_who_is_left_goes_on_as_a_resume_with_fewer_workers_does(tmp_path, strategy, step):
    """Rank 0 dies after 7 steps of 12 samples: what it reported, wrote and validated is the next one's from there."""
    orders, mark = ("kill(worker=0,at_step=6)",), 12 * step
    result = train(3, tmp_path / "killed", strategy=strategy, inject=orders, mpirun_args=ULFM)
    assert (result["lost"], result["samples"], result["fault_tolerance"]) == ({"0": "died"}, 6 * 48, "ulfm")
    assert [(row["step"], row["lost"], row["workers"]) for row in result["recoveries"]] == [(step, [0], 2)]
    assert [detail["rank"] for detail in result["ranks"]] == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows if row["event"] == "worker lost"] == [0]
    train(3, tmp_path / "whole", strategy=strategy, every=str(mark))
    fewer = tmp_path / "fewer"
    shutil.copytree(folder_of(tmp_path / "whole", mark), folder_of(fewer, mark))
    train(2, fewer, strategy=strategy, resume="auto")
    assert (tmp_path / "killed" / "again" / "result.json").exists()
    assert same_model(tmp_path / "killed" / "model.safetensors", fewer / "model.safetensors")


@pytest.mark.parametrize(("num_bytes", "btl"), [(1_000_000, TCP), (100_000, ()), (1_000_000, ())])
def test_kills_in_the_middle_of_an_allreduce_lose_no_sample_and_part_no_survivors(
    tmp_path, monkeypatch, num_bytes, btl
):
    """Three of five ranks, at random instants; more of these in `make chaos`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    chaos = importlib.import_module("chaos_allreduce")
    orders = chaos.draw_orders(1_000_000, random.Random(num_bytes + len(btl)))
    words = [word for order in orders for word in ("--inject", order)]
    job, run_dir = str(BENCHMARKS / "counted_job.py"), str(tmp_path)
    command = [sys.executable, "-m", "mpitrain", "train", job, "--run-dir", run_dir, "--quiet", *words]
    env = {
        "CHAOS_BYTES": str(num_bytes), "CHAOS_DIR": run_dir, "CHAOS_SAMPLES": str(chaos.NUM_SAMPLES),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{BENCHMARKS}",
    }  # fmt: skip
    ended = run_ranks(chaos.RANKS, command, env=env, mpirun_args=(*ULFM, *btl), timeout_s=DEADLINE_S).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["lost"]) == chaos.VICTIMS and result["status"] == "ok", str(ended)
    assert chaos.account(tmp_path) == []


ENDS = """
import os, signal
import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

runtime = start()

def loss(model, batch):
    if "{how}" == "raise" and model.training and (runtime.launched_rank, runtime.step) == (1, 1):
        raise RuntimeError("planted")
    if "{how}" == "validation" and runtime.launched_rank == 0 and not model.training:
        os.kill(os.getpid(), signal.SIGKILL)
    return toy.square_loss(model, batch)

job = toy.make_job(epochs=1, loss=loss, validate=toy.Memory(), checkpoint_every="never")
result = mt.train(job, mt.AllReduce(), run_dir="{path}", quiet=True)
runtime.exit_code = result["exit_code"]
"""


def test_an_exception_is_no_death_and_ends_the_job(tmp_path):
    """The others would meet it, too: the bits that they agree on say that one of them does not want to go on."""
    script = ENDS.format(path=tmp_path, how="raise")
    ended = run_ranks(4, script, mpirun_args=ULFM, timeout_s=DEADLINE_S)
    assert not (tmp_path / "result.json").exists()
    assert "rank 1 (worker, step 1): RuntimeError: planted" in ended.stderr
    assert ended.code != 0 and "recovered" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_rank_that_validates_may_die_in_it(tmp_path):
    run_ranks(3, ENDS.format(path=tmp_path, how="validation"), mpirun_args=ULFM, timeout_s=DEADLINE_S).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["lost"], result["samples"]) == ("ok", {"0": "died"}, 48)
    assert "validation_loss" in result["metrics"] and load_file(result["model"])


def test_a_rank_that_is_stuck_ends_itself_and_the_others_go_on(tmp_path):
    orders = ("segv(worker=2,at_step=1)", "wedge(worker=1,at_step=3)")
    result = train(4, tmp_path, inject=orders, watchdog_s=12.0, mpirun_args=ULFM)
    assert (result["lost"], result["samples"]) == ({"1": "died", "2": "died"}, 6 * 48)
    assert "self_destruct.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()
