"""The job of which `chaos_allreduce.py` kills ranks: who was in which step can be read off the weights.

Sample i moves element i of every parameter by 1 / (samples in its round), whatever the weights are. Every rank notes in
`CHAOS_DIR` which samples it computed on in which step and with whom, when it killed itself, when it heard that others
had died, its pauses between two steps, and a checksum of the weights that it ended with.
"""

import os
import time
import zlib
from pathlib import Path

import torch
from measuring.launching import NotedOs, note
from torch import nn

import mpitrain as mt
import mpitrain.mpi.faults.self_destruct as breaking
from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo
from mpitrain.mpi.runtime import start
from mpitrain.training.synchronous.recovery import Survivors
from mpitrain.training.synchronous.trainer import Trainer

NOTES = Path(os.environ["CHAOS_DIR"])
NUM_SAMPLES, NUM_PARTS, EPOCHS = int(os.environ["CHAOS_SAMPLES"]), 5, 2
WIDTH = int(os.environ["CHAOS_BYTES"]) // (4 * NUM_PARTS)
last_s = [0.0]


class Numbers:
    """A source whose samples are their numbers."""

    def scan(self):
        return Catalogue((ShardInfo("memory", NUM_SAMPLES, 8),), {"x": ArraySpec((), "int64")}, 1)

    def reader(self, catalogue, seed):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def batch(self, epoch, start, count):
        return {"x": torch.arange(start, start + count)}

    def prefetch(self, epoch, start, count):
        pass


class Known(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(NUM_PARTS)])

    def forward(self, batch):
        return -sum(part[batch["x"]].mean() for part in self.parts)


def loss(model, batch):
    now_s, step, world = time.monotonic(), start().step, start().launched
    if step > 3:  # the first ones warm up
        note(NOTES, "pause", at_s=now_s, seconds=now_s - last_s[0])
    last_s[0] = now_s
    note(NOTES, "step", step=step, world=world, ids=batch["x"].tolist())
    return model(batch)


drop_trainer, outcome = Survivors._drop_trainer, Trainer.outcome


def drop_noted(self):
    note(NOTES, "heard", at_s=time.monotonic())
    drop_trainer(self)


def outcome_noted(self):
    bits = zlib.crc32(b"".join(one.detach().cpu().numpy().tobytes() for one in self.module.parameters()))
    note(NOTES, "end", step=self.stepper.step, bits=bits)
    return outcome(self)


Survivors._drop_trainer, Trainer.outcome = drop_noted, outcome_noted
breaking.os = NotedOs(NOTES)

job = mt.Job(
    model=Known,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    data=Numbers(),
    epochs=EPOCHS,
    batch_size=4,
)
