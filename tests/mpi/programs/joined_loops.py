"""Frameworks' way into a strategy: ranks are asked first, the workers' group carries what the framework exchanges, a
model and its optimizer are prepared, and checkpoints lie beside the framework's own."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mpitrain.errors import UsageError
from mpitrain.wrapping import beside, loop
from mpitrain.wrapping.membership import join
from mpitrain.wrapping.preparing import Preparing
from tests import toy
from tests.mpi.cases import raises, run_calls

path = Path(sys.argv[1])
reader = toy.Memory(num_samples=64).reader(None, 0)


def train(preparing, model, optimizer, member, steps):
    for step in steps:
        batch = reader.batch(0, 8 * step + 4 * member.index, 4)
        loss = toy.square_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        met = torch.tensor([float(step + member.index)])  # a framework's metrics, between two pushes
        dist.all_reduce(met)
        assert met.item() == 2.0 * step + 1
    assert preparing.num_steps == steps.stop


def prepared(member):
    torch.manual_seed(3 + member.index)  # the first rank's parameters are what counts
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    optimizer = toy.adam(model.parameters())
    return Preparing(member, model, optimizer), model, optimizer


def held(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def agree(model):
    """All workers hold the same."""
    mine = held(model)
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    assert torch.equal(largest, smallest)
    return mine


def servers():
    member = join("async(servers=1)")
    assert join("async(servers=1)") == member
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(member.index), "2")
    assert dist.is_initialized() is not member.serves
    if not member.serves:
        assert (dist.get_rank(), dist.get_world_size()) == (member.index, 2)
    preparing, model, optimizer = prepared(member)
    train(preparing, model, optimizer, member, range(2))
    name = beside.save_beside(path / "first", 2)
    dist.barrier()
    shards = [*(path / "first" / name / "checkpoints").glob("*/shard-0.safetensors")]
    assert len(shards) == 1
    assert not (path / "first" / name / "lock").exists()
    train(preparing, model, optimizer, member, range(2, 4))
    last = beside.save_beside(path / "last", 4)
    dist.barrier()
    loop.finish()
    agree(model)
    assert beside.save_beside(path / "copy", 4) == last
    assert beside.save_beside(path / "gone", 5) == ""
    dist.barrier()
    assert (path / "copy" / last / "checkpoints").is_dir()
    dist.barrier()
    if member.index == 0:
        beside.keep_only(path / "copy", "another")
        assert [*(path / "copy").iterdir()] == []
    raises(
        UsageError, "copy elsewhere/ along", lambda: beside.find_beside(path / "elsewhere", last, "x.ckpt")
    )
    raises(UsageError, "holds the model alone", lambda: beside.find_beside(path / "copy", "", "x.ckpt"))
    raises(UsageError, "before the first step", lambda: preparing.begin(path))
    raises(UsageError, "servers have left", beside.begin_anew)


def one_after_another():
    """Two trainings without servers; of the first one's exchange nothing stays."""
    member = join("allreduce()")
    first, model, optimizer = prepared(member)
    train(first, model, optimizer, member, range(2))
    second, another, other = prepared(member)
    train(second, another, other, member, range(2))
    assert torch.equal(agree(model), agree(another))
    optimizer.zero_grad()
    toy.square_loss(model, reader.batch(0, 4 * member.index, 4)).backward()
    mine = torch.cat([one.grad.flatten() for one in model.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs) is (member.index == 0)


run_calls(globals())
