"""The job that `memory_told.py` trains: 25 million numbers in one layer, or in 16.

Environment: TOLD_LAYERS; TOLD_OPTIMIZER, sgd or adam.
"""

import os
from functools import partial

import torch
from torch import nn

import mpitrain as mt

LAYERS = int(os.environ.get("TOLD_LAYERS", "1"))
WIDTH = round((25_000_000 / LAYERS) ** 0.5)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
}


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": torch.ones(WIDTH)}


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def loss(module, batch):
    return (module(batch["x"]) - 1).square().mean()


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=OPTIMIZERS[os.environ.get("TOLD_OPTIMIZER", "adam")],
    data=Ones(),
    epochs=1,
    batch_size=4,
    checkpoint_every="never",
)
