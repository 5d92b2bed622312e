"""The job of `threads.py`: one of the models that benchmarks time (THREADS_MODEL), on samples that are drawn."""

import os

import torch
from measuring.models import BATCH, MODELS
from torch import nn

import mpitrain as mt

make, shape = MODELS[os.environ.get("THREADS_MODEL", "mlp")]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


job = mt.Job(
    model=make,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    data=mt.Synthetic(8192, x=(shape, "float32"), y=((), "int64", 10)),
    epochs=10_000,  # a run ends by its steps
    batch_size=BATCH,
    checkpoint_every="never",
)
