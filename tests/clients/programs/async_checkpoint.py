"""DDP that saves with torch.distributed.checkpoint's async_save half-way, goes on, and then repeats the second half."""

import tempfile

import torch
from torch import distributed as dist
from torch import optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs.recording import build_model, keep_group, samples, show, start, steps


def states(model, optimizer):
    """What is saved."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def train(rank, size):
    """The losses of this rank."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model = DistributedDataParallel(build_model())
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    batches = samples(rank, size)
    half = len(batches) // 2
    first = steps(model, optimizer, batches[:half])
    group = dist.new_group()  # of the thread that saves
    keep_group(group)
    saving = checkpoint.async_save(states(model, optimizer), checkpoint_id=folder[0], process_group=group)
    second = steps(model, optimizer, batches[half:])  # while it is written
    saving.result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert steps(model, optimizer, batches[half:]) == second
    return first + second


if __name__ == "__main__":
    show("async_checkpoint", train(*start()))
