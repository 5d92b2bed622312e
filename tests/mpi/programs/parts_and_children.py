"""Ranks 1 and 2 of three make a group of their own in a store, and a forked child is refused; then another one by
MASTER_ADDR, as under torchrun, in which they train. Rank 0 makes none.

Arguments: a folder, a port that is free.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import mpitrain
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.runtime import start

rank = MPI.COMM_WORLD.rank
if rank == 0:  # it has its own affairs, and ends when the others do
    print("apart")
    sys.stdout.flush()
    MPI.Finalize()
    sys.exit()
store = dist.FileStore(f"{sys.argv[1]}/store", 2)
member = 2 - rank  # torch's order is not MPI's
dist.init_process_group("mpi4py", store=store, rank=member, world_size=2, timeout=timedelta(seconds=60))
assert (dist.get_rank(), dist.get_world_size(), start().size) == (member, 2, 2)
tensor = torch.full((3,), float(rank))
dist.broadcast(tensor, 0)
assert tensor.tolist() == [2.0] * 3, tensor
alone = dist.new_group([1])
if member == 1:
    dist.all_reduce(tensor, group=alone)


def in_a_child(call):
    """What the child meets that calls this; its parent has posted a receive and goes on after it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def exclusive():
    with mpitrain.exclusive_mpi():
        raise AssertionError("inside")


received = torch.zeros(1)
work = dist.irecv(received, 1 - member)
for call in (
    lambda: dist.all_reduce(torch.ones(2)),
    lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
    lambda: dist.all_reduce(torch.ones(100_000)),
    dist.barrier,
    lambda: dist.send(torch.ones(1), 1 - member),
    lambda: dist.recv(torch.ones(1), 1 - member),
    work.wait,
    lambda: start().barrier(),
    exclusive,
):
    said = in_a_child(call)
    assert f"was forked from rank {member} of 2 and is no rank itself" in said, said
assert in_a_child(dist.destroy_process_group) == "nothing"
dist.barrier()  # what has arrived before a process is forked it may look at
dist.send(torch.full((1,), 7.0 + member), 1 - member)
work.wait()
assert received.item() == 8.0 - member
dist.all_reduce(tensor)
assert tensor.tolist() == [4.0] * 3, "no child was counted"
dist.destroy_process_group()

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "RANK": str(member), "WORLD_SIZE": "2"}
dist.init_process_group("mpi4py", init_method="env://", timeout=timedelta(seconds=60))
assert (dist.get_rank(), dist.get_world_size(), start().size) == (member, 2, 2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
model(torch.full((1, 3), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5] * 3], "the mean of ranks 1 and 2"
dist.barrier()
dist.destroy_process_group()
print("together")
