"""Runs whose links are said to be fast or slow, and resumes of them."""

import os
import shutil
import sys
from pathlib import Path

from torch import nn

import mpitrain as mt
from mpitrain.mpi.allreduce_plan import VARIABLE, Plan, Transport
from mpitrain.mpi.process_group.base import GroupBase
from mpitrain.mpi.runtime import start
from tests import toy

runtime, root = start(), Path(sys.argv[1])
FAST, SLOW = Transport(1e-6, 1e11), Transport(1e-4, 1e7)  # the library is trusted on fast links only


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


def train(name, transport, nodes=(0, 0, 1), pin=None, strategy="allreduce()", **options):
    runtime.nodes, runtime.num_nodes = list(nodes), max(nodes) + 1
    runtime.allreduce_plan = Plan(runtime.nodes)  # as in another process
    calls = []

    def measure(group, may_block):
        calls.append(1)
        return transport
        yield

    GroupBase._measure = measure
    os.environ.pop(VARIABLE, None)
    os.environ.update({VARIABLE: pin} if pin else {})
    job = toy.make_job(
        model=model,
        data=toy.Memory(60, num_features=64),
        epochs=3,
        batch_size=4,
        checkpoint_every="50",
        keep_checkpoints=9,
    )
    mt.train(job, run_dir=str(root / name), quiet=True, strategy=strategy, **options)
    (root / name / f"measured-{runtime.rank}").write_text(str(len(calls)))


def again(name, came_from, *arguments, **options):
    folder = root / f"{name}-from" / "checkpoints"
    if runtime.rank == 0:
        first = sorted((root / came_from / "checkpoints").glob("[0-9]*"))[0]
        shutil.copytree(first, folder / first.name)
    runtime.barrier()
    train(name, *arguments, resume=str(folder.parent), **options)


train("slow", SLOW)
again("slow-again", "slow", FAST)
again("pinned", "slow", FAST, pin="library")
again("pinned-again", "pinned", SLOW)
again("elsewhere", "slow", FAST, nodes=(0, 1, 2))
train("shards", SLOW, strategy="sharded()")
