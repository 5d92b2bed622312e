"""A program with an mpi4py of its own, started at the level that the command line names ("early": and imported first),
which uses torch.distributed in between and finds its mpi4py as it was."""

import sys

import mpi4py
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import mpitrain

level, *early = sys.argv[1:]
if level != "unset":
    mpi4py.rc.thread_level = level
if early:
    from mpi4py import MPI
else:
    from mpitrain.mpi.bindings import MPI

copied: list[str] = []
deleted: list[str] = []


def copy(comm, key, value):
    copied.append(value)
    return value


def snapshot():
    """What a program can see of its own mpi4py, which makes duplicates for its collectives of objects."""
    told = own.allgather({"rank": own.rank, (1, 2): {3}}), own.allreduce(2), MPI.COMM_WORLD.allreduce(1)
    pickled = (MPI.pickle.PROTOCOL, MPI.pickle.dumps, MPI.pickle.loads)
    handlers = [
        handle.py2f() for comm in (MPI.COMM_WORLD, MPI.COMM_SELF, own) for handle in [comm.Get_errhandler()]
    ]
    attributes = (MPI.COMM_WORLD.Get_attr(key), own.Get_attr(key), list(copied), list(deleted))
    names = [comm.name for comm in (MPI.COMM_WORLD, MPI.COMM_SELF, own)]
    levels = MPI.Query_thread(), MPI.Is_thread_main(), MPI.Is_initialized(), MPI.Is_finalized()
    return pickled, handlers, attributes, names, told, levels, dict(vars(mpi4py.rc))


def use():
    dist.init_process_group("mpi4py")
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    with mpitrain.exclusive_mpi():
        assert own.allreduce(2) == 2 * own.size
    work.wait()
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model.register_comm_hook(
        None, fp16_compress_hook
    )  # is waited for in C++, while the second thread calls MPI
    for _ in range(5):
        model(torch.randn(4, 3)).sum().backward()
    beside = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=beside)
    dist.barrier()
    dist.destroy_process_group()


MPI.pickle.PROTOCOL = 3
own = MPI.COMM_WORLD.Dup()
own.Set_errhandler(MPI.ERRORS_ARE_FATAL)
own.name = "of its own"
key = MPI.Comm.Create_keyval(copy, lambda comm, key, value: deleted.append(value))
for number, comm in enumerate((MPI.COMM_WORLD, own)):
    comm.Set_attr(key, f"attribute {number}")
before = snapshot()
for _ in range(2):  # the second time without a warning
    use()
    assert snapshot() == before, (snapshot(), before)
names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
print(names.get(MPI.Query_thread(), "multiple"), flush=True)
