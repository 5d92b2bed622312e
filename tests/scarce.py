"""A job whose model needs more memory than a rank gets in tests."""

from functools import partial

import torch
from torch import nn

import mpitrain as mt

WIDTH, BLOCKS, BATCH = 256, 28, 64
NEEDED_BYTES = (
    4 * 4 * BLOCKS * (8 * WIDTH * WIDTH + 7 * WIDTH)
)  # float32, with gradients and Adam's two moments


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(width=WIDTH):
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def several():
    """Layers of several kinds, tensors that are large enough to be made later, and a buffer."""
    first, normed = nn.Linear(32, 64), nn.BatchNorm1d(1024)
    nn.init.orthogonal_(first.weight, 2.0)
    return nn.Sequential(
        first, nn.Linear(64, 1024), normed, nn.Linear(1024, 32), Block(32), nn.Linear(32, 32)
    )


def reading_weights():
    """Keeps a tensor that has a gradient function, so that it has to be built at once."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 64)), nn.Linear(64, 32))


def data(width=WIDTH):
    return mt.Synthetic(BATCH * 2, x=((width,), "float32"), y=((width,), "float32"))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def size():
    """Private memory that this process may write to, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=1e-3),
    data=data(),
    epochs=1,
    tensor_plan={"*.up": "column", "*.down": "row"},
)
