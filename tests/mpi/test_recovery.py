"""Allreduce goes on without the ranks that die: with the bits of a resume with fewer workers, every sample once."""

import json
import math
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import folder_of
from mpitrain.training.measure import same_model
from tests.ranks import run_ranks

ULFM = ("--with-ft", "ulfm")
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
DEADLINE_S = 180.0

# Nobody dies: some ranks are only told so, in the middle of a step, and the others hear of it from them.
ALARM = """
import mpitrain as mt
from mpitrain.mpi.recovery import lost_peer
from mpitrain.mpi.runtime import start
from mpitrain.text import parse
from mpitrain.training.allreduce import Trainer
from tests import toy

runtime = start()
update, alarmed, met = Trainer._update, (), set()

def alarming(self, value, count):
    # the allreduce is done everywhere: who is not alarmed takes the step, the others have lost it
    if self.step == 5 and runtime.rank in alarmed and name not in met:
        met.add(name)
        raise lost_peer()
    update(self, value, count)

Trainer._update = alarming
for name, (codec, alarmed) in {cases!r}.items():
    job = toy.make_job(epochs=6, batch_size=4, checkpoint_every="never")
    result = mt.train(job, parse(f"allreduce({{codec}})", "strategy"), run_dir=f"{path}/{{name}}", quiet=True)
    assert result["exit_code"] == 0 and result["lost"] == {{}}, result
    assert [row["step"] for row in result["recoveries"]] == {{(): [], (0, 1, 2): [5]}}.get(alarmed, [6]), result
"""
CODECS = {
    "full": "",
    "threshold": "codec=threshold(density=0.1,dense_below=0)",
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
    assert same_model(*models)


RUN = """
import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

job = toy.make_job(epochs=6, batch_size=4, checkpoint_every="{every}", keep_checkpoints=99, validate=toy.Memory())
result = mt.train(job, mt.AllReduce(), run_dir="{path}", quiet=True, resume={resume!r}, inject={inject!r},
    watchdog_s={watchdog_s})
start().exit_code = result["exit_code"]
"""


def train(ranks, path, every="never", resume=None, inject=(), watchdog_s=0.0, mpirun_args=()):
    script = RUN.format(every=every, path=path, resume=resume, inject=inject, watchdog_s=watchdog_s)
    ended = run_ranks(ranks, script, mpirun_args=mpirun_args, timeout_s=DEADLINE_S).check()
    assert (path / "result.json").exists(), str(ended)
    return json.loads((path / "result.json").read_text())


def test_who_is_left_goes_on_as_a_resume_with_fewer_workers_does(tmp_path):
    """Rank 0 dies after 7 steps of 12 samples: what it reported, wrote and validated is the next one's from there."""
    orders = ("kill(worker=0,at_step=6)",)
    result = train(3, tmp_path / "killed", inject=orders, mpirun_args=ULFM)
    assert (result["lost"], result["samples"], result["fault_tolerance"]) == ({"0": "died"}, 6 * 48, "ulfm")
    assert [(row["step"], row["lost"], row["workers"]) for row in result["recoveries"]] == [(7, [0], 2)]
    assert [detail["rank"] for detail in result["ranks"]] == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows if row["event"] == "worker lost"] == [0]
    train(3, tmp_path / "whole", every="84")
    fewer = tmp_path / "fewer"
    shutil.copytree(folder_of(tmp_path / "whole", 84), folder_of(fewer, 84))
    train(2, fewer, resume="auto")
    assert same_model(tmp_path / "killed" / "model.safetensors", fewer / "model.safetensors")


# Sample i moves element i of every parameter by rate / (samples in its round): who was in which step can be read off.
COUNTED = """
import json, os, random, signal, threading, zlib
import torch
from torch import nn
import mpitrain as mt
from mpitrain.data.catalogue import ArraySpec, Catalogue, ShardInfo
from mpitrain.mpi.runtime import start
from mpitrain.training.allreduce import Trainer

NUM_SAMPLES, WIDTH, kills = {num_samples}, {width}, {kills!r}
runtime = start()
log = open(f"{path}/rank-{{runtime.rank}}.jsonl", "w", buffering=1)

class Numbers:
    def scan(self):
        return Catalogue((ShardInfo("memory", NUM_SAMPLES, 8),), {{"x": ArraySpec((), "int64")}}, 1)

    def reader(self, catalogue, seed):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def batch(self, epoch, start, count):
        return {{"x": torch.arange(start, start + count)}}

    def prefetch(self, epoch, start, count):
        pass

class Known(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(3)])

def hurt():
    os.kill(os.getpid(), signal.SIGKILL)

def loss(model, batch):
    step = runtime.step
    print(json.dumps({{"step": step, "ids": batch["x"].tolist()}}), file=log)
    at, delay_s = kills.get(runtime.launched_rank, (-1, 0))
    if step == at:
        threading.Timer(delay_s, hurt).start()
    parts = list(model.parameters())
    return -sum(part[batch["x"]].mean() for part in parts)

run, outcome = Trainer.run, Trainer.outcome

def told(self):
    bits = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in self.module.parameters()))
    print(json.dumps({{"bits": bits, "step": self.step}}), file=log)
    return outcome(self)

Trainer.outcome = told
# DDP alone wants one forward pass of the module: its loss is handed the module itself
Known.forward = lambda self, batch: loss(self, batch)
job = mt.Job(
    model=Known, loss=lambda model, batch: model(batch), data=Numbers(), epochs=2, batch_size=4,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), checkpoint_every="never",
)
result = mt.train(job, mt.AllReduce(), run_dir="{path}/run", quiet=True)
runtime.exit_code = result["exit_code"]
"""
NUM_SAMPLES = 96


def read_steps(path, ranks):
    """(what each rank computed in each step last, how often it was in it, the bits that each survivor ended with)."""
    last, bits = {}, {}
    for rank in range(ranks):
        for line in (path / f"rank-{rank}.jsonl").read_text().splitlines():
            with_step = json.loads(line)
            if "bits" in with_step:
                bits[rank] = with_step["bits"]
            else:
                last.setdefault(with_step["step"], {}).setdefault(rank, []).append(with_step["ids"])
    return last, bits


@pytest.mark.parametrize(("width", "btl"), [(90_000, TCP), (2000, ()), (90_000, ())])
def test_kills_in_the_middle_of_an_allreduce_lose_no_sample_and_part_no_survivors(tmp_path, width, btl):
    """Three of five ranks, rank 0 among them, in buckets of 1 MB or of 24 KB; more of these in `make chaos`."""
    draw = random.Random(width + len(btl))
    victims = [0, *draw.sample(range(1, 5), 2)]
    kills = {rank: (draw.randrange(2, 9), draw.choice((0.0, 3e-4, 1e-3, 3e-3, 1e-2))) for rank in victims}
    script = COUNTED.format(path=tmp_path, num_samples=NUM_SAMPLES, width=width, kills=kills)
    ended = run_ranks(5, script, mpirun_args=(*ULFM, *btl), timeout_s=DEADLINE_S).check()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result["lost"]) == {str(rank) for rank in kills}, ended
    assert (result["status"], result["samples"]) == ("ok", 2 * NUM_SAMPLES)
    last, bits = read_steps(tmp_path, 5)
    alive = set(range(5)) - set(kills)
    assert {bits[rank] for rank in alive} == {bits[min(alive)]}, "survivors hold different parameters"
    expected, taken = torch.zeros(NUM_SAMPLES, dtype=torch.float64), []
    for step in range(result["steps"]):
        # done again: by those that were left; else the dead one's share is in the parameters, too
        redone = max(len(last[step].get(rank, [])) for rank in alive)
        ids = [i for tries in last[step].values() if len(tries) == redone for i in tries[-1]]
        taken += ids
        expected[ids] += 1.0 / len(ids)
    assert sorted(taken) == sorted([*range(NUM_SAMPLES)] * 2)
    model = load_file(result["model"])
    for tensor in model.values():
        assert torch.allclose(tensor[:NUM_SAMPLES].double(), expected, rtol=1e-6, atol=0)
        assert float(tensor[NUM_SAMPLES:].abs().sum()) == 0.0
    assert math.isclose(float(expected.sum()), result["steps"], rel_tol=1e-9)


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
    assert "breaking.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()
