"""torchsnapshot: snapshots of a DDP loop taken in the background (`async_take`), while it trains on; then it goes on
from one of them, which gives the losses that it had."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs.recording import build_model, samples, show, start


def train(rank, size):
    """The losses before and after going back."""
    from torchsnapshot import RNGState, Snapshot, StateDict

    model = DistributedDataParallel(build_model())
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "at": StateDict(step=0), "rng": RNGState()}
    batches, losses = list(samples(rank, size)), []
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)

    def step(number):
        x, y = batches[number]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    taken = []
    for number in range(6):
        step(number)
        state["at"]["step"] = number + 1
        taken.append(Snapshot.async_take(f"{shared[0]}/{number}", state, replicated=["**"]))
    snapshot = [each.wait() for each in taken][1]
    snapshot.restore(state)
    assert state["at"]["step"] == 2
    for number in range(2, 6):
        step(number)
    assert torch.allclose(torch.tensor(losses[2:6]), torch.tensor(losses[6:])), losses
    return losses


if __name__ == "__main__":
    show("snapshots", train(*start()))
