"""Several servers over real ranks, with a job in which every sample adds one to rows of its own, one on each shard:
whatever is told to end, is started again, also with other servers, or dies between two shards, all rows end the same.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import FOLDER, listed
from tests.ranks import run_ranks

# Row i of each half counts sample i: with two servers each holds one half, with one or three they are cut elsewhere.
PROGRAM = """
import os, shutil, signal, sys, time
import torch
from torch import nn
import mpitrain as mt
from mpitrain.effects import Kind, Send, watched
from mpitrain.mpi.runtime import start
from mpitrain.roles import Worker
from mpitrain.values import parse
from mpitrain.training import signals
from tests import toy

NUM_SAMPLES, EPOCHS = 48, 4
runtime = start()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, NUM_SAMPLES))

    def forward(self, index):
        return -self.weight[:, index].sum()

class Indices(toy.Memory):
    def reader(self, catalogue, seed):
        return Reader(self)

class Reader(toy.MemoryReader):
    def batch(self, epoch, start, count):
        return {{"index": torch.arange(start, start + count)}}

def run(name, text, resume=None, victim=-1, every="never"):
    calls = []

    def loss(model, batch):
        calls.append(1)
        time.sleep(0.002 * (1 + runtime.rank % 2))
        if len(calls) == 9 and runtime.rank == victim:
            os.kill(os.getpid(), signal.SIGUSR1)
        return model(batch["index"])

    job = mt.Job(
        model=Counts, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        data=Indices(NUM_SAMPLES, window_samples=4), epochs=EPOCHS, batch_size=2, checkpoint_every=every,
        keep_checkpoints=99,
    )
    return mt.train(job, parse(text, "strategy"), run_dir="{path}/" + name, quiet=True, resume=resume)

{runs}
"""
RULES = {
    "async": "async(servers={})",
    "inflight": "async(servers={},inflight=2)",
    "ssp": "ssp(bound=1,servers={})",
    "pushes": "async(servers={},push_every=2)",
}
FINISHED = 4.0


def check_rows(path, servers):
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["failure"], result["samples"]) == ("ok", "", 4 * 48)
    shards = [rank for rank in result["ranks"] if rank["role"] == "server"]
    assert [shard["samples_accepted"] for shard in shards] == [4 * 48] * servers
    rows = load_file(result["model"])["weight"]
    assert torch.equal(rows, torch.full_like(rows, FINISHED)), rows
    return result


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Every strategy told to end, and trained whole with checkpoints; then gone on from with one, two and three
    servers."""
    path = tmp_path_factory.mktemp("stopped")
    lines = [
        f"result = run({name!r}, {text.format(2)!r}, victim=2)\nrun('{name}-whole', {text.format(2)!r}, every='40')"
        for name, text in RULES.items()
    ]
    ended = run_ranks(4, PROGRAM.format(path=path, runs="\n".join([*lines, "runtime.exit_code = 0"])))
    ended.check()
    lines = []
    for name, text in RULES.items():
        for folder in listed(path / f"{name}-whole")[:-1]:
            shutil.rmtree(folder)
        for servers in (1, 2, 3):
            for source in (name, f"{name}-whole"):
                to = path / f"{source}-{servers}" / FOLDER
                to.parent.mkdir()
                shutil.copytree(path / source / FOLDER, to)
                lines.append(f"run('{source}-{servers}', {text.format(servers)!r}, 'auto')")
    run_ranks(4, PROGRAM.format(path=path, runs="\n".join(lines))).check()
    return path


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_run_that_goes_on_takes_every_sample_once_on_every_shard(stopped, name, servers):
    ended = json.loads((stopped / name / "result.json").read_text())
    assert ended["status"] == "requeue"
    assert check_rows(stopped / f"{name}-{servers}", servers)["resumed_from"] > 0
    assert 0 < check_rows(stopped / f"{name}-whole-{servers}", servers)["resumed_from"] < 4 * 48


DYING = """
def between_two_shards(role):
    def before(effect):
        pushes = isinstance(effect, Send) and effect.message.kind == Kind.PUSH and effect.message.step == 5
        if pushes and effect.to == 1:
            engine = runtime.engine
            engine.wait_any(lambda: all(op.passive for op in engine.outstanding), 10)  # the first shard has it
            os.kill(os.getpid(), signal.SIGKILL)
    return watched(role, before)

if runtime.rank == 3:
    whole = Worker.run
    Worker.run = lambda self: between_two_shards(whole(self))
run("dying", "ssp(bound=2,servers=2)")
"""


def test_a_worker_that_dies_between_two_shards_leaves_nothing_half_judged(tmp_path):
    """What it had pushed to the first shard alone is computed again, and only the second one takes it."""
    run_ranks(
        5, PROGRAM.format(path=tmp_path, runs=DYING), mpirun_args=("--with-ft", "ulfm"), timeout_s=180.0
    )
    result = check_rows(tmp_path / "dying", 2)
    assert result["lost"] == {"3": "died"}
    assert result["repeated"] == 1
