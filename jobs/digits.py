"""Handwritten digits: a small convolutional network on 1,797 real 8x8 images.

mpitrain data pack digits data/digits
mpitrain launch -n 4 train jobs/digits.py
mpitrain launch -n 4 train jobs/digits.py --strategy "async(servers=1)"
"""

from functools import partial

import torch
from torch import nn

import mpitrain as mt


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float().mean()}


job = mt.Job(
    model=model,
    loss=loss,
    # Adam, because one rate serves both 64-sample synchronous steps and stale 16-sample asynchronous ones.
    optimizer=partial(torch.optim.Adam, lr=2e-3),
    data=mt.Shards("data/digits/train-*.h5"),
    validate=mt.Shards("data/digits/validate-*.h5"),
    metrics=metrics,
    epochs=20,
    batch_size=16,
    target={"accuracy": 0.97},
    synthetic=mt.Synthetic(8192, x=((1, 8, 8), "float32"), y=((), "int64", 10)),
)
