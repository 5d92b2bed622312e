"""The job of `node_outage.py`: a batch is a sleep of 50 ms, and every rank notes when each one begins."""

import os
import time

import torch
from torch import nn

import mpitrain as mt

BATCH_S, NUM_BATCHES, NUM_NUMBERS = 0.05, 400, 250_000
_notes = open(f"{os.environ['NOTES']}/{os.environ.get('SLURM_PROCID', '0')}", "a")  # noqa: SIM115 - for as long as it lives


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_NUMBERS))

    def forward(self, x):
        return self.weight.sum() * x.mean()


def loss(model, batch):
    print(time.monotonic(), file=_notes, flush=True)
    time.sleep(BATCH_S)
    return model(batch["x"])


job = mt.Job(
    model=Numbers,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    data=mt.Synthetic(num_samples=NUM_BATCHES, x=((2,), "float32")),
    epochs=1,
    batch_size=1,
)
