"""Workers that die, raise or stop: the run goes on, takes every sample, and says whom it lost."""

import json
import random

import pytest
from safetensors.torch import load_file

from tests.ranks import run_ranks

ULFM = ("--with-ft", "ulfm")

# One rank does something to itself at its so-and-so-many-th batch.
PROGRAM = """
import os, random, signal, sys, threading, time
import torch
from torch import nn
import mpitrain as mt
from mpitrain.text import parse
from mpitrain.mpi.runtime import start
from tests import toy

runtime = start()
faults, calls = {faults!r}, []

def hurt(how):
    if how == "raise":
        raise RuntimeError("planted")
    os.kill(os.getpid(), getattr(signal, how))

def loss(model, batch):
    calls.append(1)
    time.sleep(0.002)
    how, at, delay_s = faults.get(runtime.rank, ("", 0, 0.0))
    if len(calls) == at:
        # a kill comes from another thread, so that it may hit in the middle of a message
        threading.Timer(delay_s, hurt, [how]).start() if delay_s else hurt(how)
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

def wide():
    return nn.Sequential(nn.Linear(5, {width}), nn.Tanh(), nn.Linear({width}, 1))

job = toy.make_job(
    model=wide, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05 / {width}),
    epochs={epochs}, batch_size=4, validate=toy.Memory(), checkpoint_every="never",
)
result = mt.train(job, parse("{strategy}", "strategy"), run_dir="{path}", quiet=True)
runtime.exit_code = result["exit_code"]
"""


def run(path, strategy, faults, ranks=5, epochs=20, width=50, mpirun_args=ULFM, **options):
    script = PROGRAM.format(strategy=strategy, faults=faults, epochs=epochs, width=width, path=path)
    ended = run_ranks(ranks, script, mpirun_args=mpirun_args, **options)
    assert (path / "result.json").exists(), str(ended)
    return ended, json.loads((path / "result.json").read_text())


def check_complete(result, lost):
    """Nothing phantom was applied, the identity holds, and the model is there."""
    assert (result["status"], result["failure"], result["lost"]) == ("ok", "", lost)
    for detail in result["ranks"]:
        if detail["role"] == "server":
            assert detail["staleness_identity"][0] == detail["staleness_identity"][1]
            assert detail["accepted"] == sum(detail["staleness_histogram"].values())
    assert result["metrics"]["validation_loss"] < 10
    assert load_file(result["model"])


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        ("async(servers=2)", {3: ("SIGKILL", 9, 0.0)}),
        ("softsync(updates=2,damping=inverse())", {1: ("raise", 9, 0.0)}),  # the validator: somebody inherits
        ("ssp(bound=2)", {2: ("SIGSEGV", 7, 0.0), 4: ("SIGKILL", 20, 0.0)}),
        ("sync()", {2: ("SIGKILL", 5, 0.0)}),
    ],
)
def test_a_worker_that_dies_is_not_missed(tmp_path, strategy, faults):
    ended, result = run(tmp_path, strategy, faults)
    check_complete(result, {str(rank): "died" for rank in faults})
    assert result["samples"] == 20 * 48
    assert ended.code == 0, ended
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [event["rank"] for event in events if event["event"] == "worker lost"]
    assert sorted(told) == sorted(faults)


@pytest.mark.parametrize("width", [40_000, 3000])
def test_kills_at_random_instants_leave_no_phantom_and_no_torn_update(tmp_path, width):
    """Over TCP, where a transfer takes longest; more of these in `make chaos`."""
    draw = random.Random(width)
    faults = {rank: ("SIGKILL", draw.randrange(3, 12), draw.uniform(0.0001, 0.02)) for rank in (2, 3)}
    options = (*ULFM, "--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
    _, result = run(tmp_path, "async()", faults, epochs=8, width=width, mpirun_args=options)
    check_complete(result, {"2": "died", "3": "died"})
    assert result["samples"] == 8 * 48


@pytest.mark.parametrize("mpirun_args", [ULFM, ()])
def test_a_worker_that_stops_holds_nobody_up_and_the_run_ends(tmp_path, mpirun_args):
    """No fault-tolerant MPI is needed for this; without one the stopped rank is ended by MPI_Abort at the very end."""
    ended, result = run(tmp_path, "async()", {2: ("SIGSTOP", 5, 0.0)}, mpirun_args=mpirun_args)
    check_complete(result, {"2": "silent"})
    assert result["samples"] == 20 * 48 and ended.code == 0, ended


def test_the_last_worker_cannot_be_done_without(tmp_path):
    _, result = run(tmp_path, "async()", {1: ("SIGKILL", 5, 0.0)}, ranks=2)
    assert result["status"] == "fail" and "no other worker is left" in result["failure"]


WEDGED = """
import time
import mpitrain as mt
from mpitrain.text import parse
from mpitrain.mpi.runtime import start
from tests import toy

runtime = start()
calls = []

def loss(model, batch):
    calls.append(1)
    while runtime.rank == 1 and len(calls) == 5:
        time.sleep(0.1)  # for ever: this is the line
    return toy.square_loss(model, batch)

mt.train(toy.make_job(loss=loss), parse("{strategy}", "strategy"), run_dir="{path}", quiet=True, watchdog_s=4)
"""


@pytest.mark.parametrize("strategy", ["sync()", "allreduce()"])
def test_a_wedged_rank_writes_its_stacks_and_ends_the_job(tmp_path, strategy):
    ended = run_ranks(3, WEDGED.format(strategy=strategy, path=tmp_path))
    assert ended.code not in (0, 75), ended
    assert "no progress for 4 s" in ended.stderr and not (tmp_path / "result.json").exists()
    assert " in loss" in (tmp_path / "stacks" / "rank-1.txt").read_text()
