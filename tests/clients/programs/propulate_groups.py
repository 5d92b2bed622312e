"""Propulate, which searches with several workers of two ranks each: every evaluation makes a process group of the two,
as in the package's tutorial on DDP, trains in it and leaves it, while Propulate itself talks over MPI."""

import contextlib
import functools
import io
import os
import random
import sys
import tempfile

import torch
import torch.distributed as dist
from mpi4py import MPI
from propulate import Islands
from propulate.utils import get_default_propagator
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs import recording

RANKS_PER_WORKER = 2


def loss_of(backend, history, params, comm):
    """Of a training with these parameters, on the ranks of `comm`; Propulate makes it as small as it can."""
    port = 0
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", port, comm.size, True, wait_for_workers=False)
        port = store.port
    port = comm.bcast(port, root=0)
    if comm.rank > 0:
        store = dist.TCPStore("127.0.0.1", port, comm.size, False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    recording.keep_group()
    model = DistributedDataParallel(recording.build_model())
    optimizer = optim.SGD(model.parameters(), lr=params["lr"], momentum=params["momentum"])
    losses = torch.tensor(recording.steps(model, optimizer, recording.samples(comm.rank, comm.size)))
    dist.all_reduce(losses)
    history.append((recording.carried_by(), losses.tolist()))
    dist.destroy_process_group()
    return losses[-1].item()


def search(backend):
    """Every evaluation's losses, on all ranks in an order of their own."""
    history = []
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    rng = random.Random(42 + rank // RANKS_PER_WORKER)
    limits = {"lr": (0.001, 0.1), "momentum": (0.0, 0.9)}
    islands = Islands(
        loss_fn=functools.partial(loss_of, backend, history),
        propagator=get_default_propagator(pop_size=4, limits=limits, rng=rng),
        rng=rng,
        generations=4,
        num_islands=size // RANKS_PER_WORKER,
        migration_probability=0.0,  # what an island has heard of others depends on who is faster
        pollination=False,
        checkpoint_path=MPI.COMM_WORLD.bcast(tempfile.mkdtemp(), root=0),
        ranks_per_worker=RANKS_PER_WORKER,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        islands.propulate(logging_interval=10, debug=0)
        islands.summarize(top_n=1, debug=0)
    return history


history = search(sys.argv[1])
MPI.COMM_WORLD.Barrier()
assert len(history) == 4, history
backends = {backend for backend, _ in history}
recording.put("propulate_groups", sum((losses for _, losses in history), []), " ".join(backends))
if sys.argv[1] == "gloo":
    MPI.Finalize()
    os._exit(0)  # its groups abort a process that ends with them
