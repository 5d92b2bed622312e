"""The job that `chaos.py` kills workers of: every update is known beforehand, and every rank notes what it sees.

The gradient of `mean(x) * (pattern . weight)` with x = 1 is the pattern, whatever the weights, so after K updates each
of the N weights is exactly -K * rate * pattern: one phantom update, or one torn one, and they are not. Notes go to
`CHAOS_DIR`: when a process kills itself, when the server hears of it, and every pause between two batches of each
worker (one clock for all ranks of a host).
"""

import os
import time
from pathlib import Path

import torch
from measuring.launching import NotedOs, note
from torch import nn

import mpitrain as mt
import mpitrain.mpi.faults.self_destruct as breaking
from mpitrain.roles import FaultTolerantServer

NUM_WEIGHTS = int(os.environ["CHAOS_BYTES"]) // 4
NOTES = Path(os.environ["CHAOS_DIR"])
RATE = 2.0**-10
began_s = [0.0]
num_batches = [0]


def pattern():
    return torch.arange(NUM_WEIGHTS).remainder(7).add(1).float() / 8


class Known(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_WEIGHTS))
        self.register_buffer("pattern", pattern(), persistent=False)

    def forward(self, x):
        return (self.weight * self.pattern).sum() * x.mean()


def loss(model, batch):
    now_s = time.monotonic()
    num_batches[0] += 1
    if num_batches[0] > 3:  # the first ones warm up
        note(NOTES, "pause", at_s=now_s, seconds=now_s - began_s[0])
    began_s[0] = now_s
    time.sleep(float(os.environ.get("CHAOS_SLEEP_S", "0")))
    return model(torch.ones_like(batch["x"]))


breaking.os = NotedOs(NOTES)
lose = FaultTolerantServer._lose


def lose_noted(self, worker, how):
    if worker not in self.table.lost:
        note(NOTES, "lost", lost=worker, how=how, at_s=time.monotonic())
    yield from lose(self, worker, how)


FaultTolerantServer._lose = lose_noted

job = mt.Job(
    model=Known,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    data=mt.Synthetic(num_samples=int(os.environ["CHAOS_SAMPLES"]), x=((2,), "float32")),
    epochs=1,
    batch_size=1,
)
