"""Runs whose links are said to be fast or slow, and resumes of them."""

import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import mpitrain as mt
from mpitrain.mpi.allreduce_plan import VARIABLE, Plan, Transport
from mpitrain.mpi.process_group.base import GroupBase
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.mpi.runtime import start
from mpitrain.training.measure import save_model
from mpitrain.values import parse
from mpitrain.wrapping import loop
from tests import toy

runtime, root = start(), Path(sys.argv[1])
FAST, SLOW = Transport(1e-6, 1e11), Transport(1e-4, 1e7)  # the library is trusted on fast links only
LIBRARY_VARIABLE = "OMPI_MCA_coll_tuned_allreduce_algorithm"
CALL = GroupBase._call
nonblocking = []
reader = toy.Memory(num_samples=128, num_features=64).reader(None, 0)


def model():
    return nn.Sequential(nn.Linear(64, 129), nn.Tanh(), nn.Linear(129, 1))


def begin(transport, nodes=(0, 0, 1), pin=None, told_library=""):
    """As in another process: (ranks lie on these nodes, links are such, the environment pins an algorithm or tells the
    library something); what is returned is filled by every measurement, and by every nonblocking sum."""
    os.environ.pop(LIBRARY_VARIABLE, None)
    os.environ.update({LIBRARY_VARIABLE: told_library} if told_library else {})
    runtime.nodes, runtime.num_nodes = list(nodes), max(nodes) + 1
    runtime.allreduce_plan = Plan(runtime.nodes, runtime.library)
    calls = []

    def measure(group, may_block):
        calls.append(1)
        return transport
        yield

    def carry(group, may_block, operation, *arguments):
        if "educe" in operation and not may_block and group.size() > 2:
            nonblocking.append(operation)  # the library adds in another order then, and when is timing
        return CALL(group, may_block, operation, *arguments)

    GroupBase._measure, GroupBase._call = measure, carry
    os.environ.pop(VARIABLE, None)
    os.environ.update({VARIABLE: pin} if pin else {})
    return calls


def train(name, transport, nodes=(0, 0, 1), pin=None, strategy="allreduce()", told_library="", **options):
    calls = begin(transport, nodes, pin, told_library)
    job = toy.make_job(
        model=model,
        data=toy.Memory(60, num_features=64),
        epochs=3,
        batch_size=4,
        checkpoint_every="50",
        keep_checkpoints=9,
        tensor_plan={"0": "column", "2": "row"} if strategy.startswith("tensor") else {},
    )
    mt.train(job, run_dir=str(root / name), quiet=True, strategy=strategy, **options)
    (root / name / f"measured-{runtime.rank}").write_text(str(len(calls)))


def own_loop(name, transport, strategy, resume=None):
    calls = begin(transport)
    loop._wrapped = None  # one wrap a process is all that scripts need
    torch.manual_seed(3)
    inner = model()
    parallel, optimizer = mt.wrap(
        inner,
        toy.adam(inner.parameters()),
        parse(strategy, "strategy"),
        resume=resume and str(root / resume),
    )
    begun = mt.resumed()
    for step in range(begun.step if begun else 0, 8):
        batch = reader.batch(0, 12 * step + 4 * mt.worker_index(), 4)
        optimizer.zero_grad()
        toy.square_loss(parallel, batch).backward()
        optimizer.step()
        if step == 3:
            mt.save(str(root / name), 4)
    mt.finish()
    if runtime.rank == 0:
        (root / name).mkdir(exist_ok=True)
        save_model(inner, root / name / "model.safetensors", {})
    runtime.barrier()
    (root / name / f"measured-{runtime.rank}").write_text(str(len(calls)))
    leave_default_group(runtime)


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
again("told-library", "slow", FAST, told_library="4")
for kind in ("sharded", "localsgd", "tensor"):
    text = {
        "sharded": "sharded()",
        "localsgd": "localsgd(period=2,average_optimizer=True)",
        "tensor": "tensor(parallel=3)",
    }[kind]
    train(kind, SLOW, strategy=text)
    again(f"{kind}-again", kind, FAST, strategy=text)
for text in ("allreduce()", "localsgd(period=2)"):
    name = "loop-" + text.partition("(")[0]
    own_loop(name, SLOW, text)
    own_loop(f"{name}-again", FAST, text, resume=name)
assert not nonblocking, nonblocking
