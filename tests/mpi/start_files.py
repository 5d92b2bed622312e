"""What the tests of initial weights share: the strategies, and a file of weights whose means are exact."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

STRATEGIES = [
    "allreduce()", "localsgd(period=2)", "decentralized()", "decentralized(topology='ring')", "sync()",
    "async()", "async(optimizer='worker')", "elastic(push_every=2)", "sharded()", "pipeline(stages=3)",
    "tensor(parallel=3)",
]  # fmt: skip

JOB = """
import torch
from torch import nn

import mpitrain as mt
from tests import toy
from tests.mpi.start_files import model

job = mt.Job(
    model=model, loss=toy.square_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    data=toy.Memory(36, window_samples=4), batch_size=4, tensor_plan={"0": "gather", "3": "gather"},
    stages=["0", "1", "2", "3", "4", "5"],
)
"""


class Shift(nn.Module):
    """A layer with a buffer alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.zeros(6))

    def forward(self, x):
        return x + self.by


def model():
    """Its first layer is frozen."""
    made = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Shift(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    made[0].requires_grad_(False)
    return made


def write_start(folder: Path) -> dict[str, torch.Tensor]:
    """`start.safetensors` for `model`, whose numbers sum up without rounding; and `other.safetensors`, which does not
    fit it."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randint(-8, 9, one.shape, generator=generator) / 16.0
        for name, one in model().state_dict().items()
    }
    save_file(weights, folder / "start.safetensors")
    other = {name: one for name, one in weights.items() if name != "3.bias"}
    save_file(other | {"5.weight": torch.ones(2, 6), "head": torch.ones(3)}, folder / "other.safetensors")
    return weights
