"""What the programs of this folder share: the data, the start, and the curve that they print."""

import atexit
import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS = 8


def build_model():
    """The same on every rank."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(rank, size):
    """This rank's batches: pairs of inputs and wanted outputs."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(STEPS, 8 * size, 6, generator=generator)
    wanted = inputs.square().sum(2, keepdim=True).sqrt()
    return [(x[rank::size], y[rank::size]) for x, y in zip(inputs, wanted)]


def steps(model, optimizer, batches):
    """Train on these batches; their losses."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def start():
    """Make the process group of the backend that the command line names; (rank, size)."""
    dist.init_process_group(sys.argv[1], init_method="mpi://")
    keep_group()
    return dist.get_rank(), dist.get_world_size()


def keep_group(group=None):
    """torch 2.13 may hang where a group of gloo is destroyed (see benchmarks/measuring/gloo.py), and one that lives to
    the end of the process may abort it there."""
    if dist.get_backend() == "gloo":
        atexit.register(_leave)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group or dist.group.WORLD))


def _leave():
    """End the process, unless MPI is there: that has an order of its own in which ranks end."""
    if "mpi4py.MPI" not in sys.modules:
        os._exit(0)


def show(name, losses):
    """Print the losses of this rank, and which backend they came over."""
    assert len(losses) >= STEPS and losses[-1] < losses[0], losses
    put(name, losses, carried_by())


def put(name, losses, backend):
    """Print them as they are."""
    print(json.dumps({"program": name, "backend": backend, "losses": losses}), flush=True)


def carried_by():
    """The default group's backend: one of ours that stands for gloo answers to gloo's name."""
    return "mpi4py" if type(dist.group.WORLD).__name__ == "MpiProcessGroup" else dist.get_backend()
