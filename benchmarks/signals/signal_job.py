"""The job that `signals.py` sends signals to: some seconds of training, validation after each epoch, checkpoints."""

import time
from dataclasses import dataclass

import torch
from torch import nn

import mpitrain as mt
from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo

STEP_S, VALIDATION_S = 0.01, 0.05


@dataclass(frozen=True)
class Numbers:
    """Samples drawn on a grid."""

    num_samples: int = 320

    def scan(self):
        return Catalogue(
            (ShardInfo("memory", self.num_samples, self.num_samples),), {"x": ArraySpec((8,), "float32")}, 1
        )

    def reader(self, catalogue, seed):
        return Reading(self.num_samples)


class Reading:
    """All of them in memory."""

    def __init__(self, num_samples):
        self.x = torch.randint(-8, 9, (num_samples, 8), generator=torch.Generator().manual_seed(3)) / 8.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def batch(self, epoch, start, count):
        return {"x": self.x[start : start + count].clone()}

    def prefetch(self, epoch, start, count):
        pass

    def sequential(self, batch_size, first=0, end=None):
        yield {"x": self.x[first:end]}


def loss(model, batch):
    time.sleep(STEP_S if model.training else VALIDATION_S)
    return ((model(batch["x"]) - batch["x"].sum(1, keepdim=True)) ** 2).mean()


job = mt.Job(
    model=lambda: nn.Linear(8, 1),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    data=Numbers(),
    validate=Numbers(),
    epochs=6,
    batch_size=8,
    checkpoint_every="160",
)
