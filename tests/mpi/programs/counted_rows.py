"""A job in which every sample adds one to rows of its own: row i of each half counts sample i.

With two servers each holds one half, with one or three they are cut elsewhere.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpitrain as mt
from mpitrain.effects import Send, watched
from mpitrain.messages import Push
from mpitrain.mpi.runtime import start
from mpitrain.roles import Worker
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls

NUM_SAMPLES, EPOCHS = 48, 4
runtime, path = start(), Path(sys.argv[1])
signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, NUM_SAMPLES))

    def forward(self, index):
        return -self.weight[:, index].sum()


class Indices(toy.Memory):
    def reader(self, catalogue, seed):
        return Reader(self)


class Reader(toy.MemoryReader):
    def batch(self, epoch, start, count):
        return {"index": torch.arange(start, start + count)}


def run(name, text, resume=None, victim=-1, every="never"):
    calls = []

    def loss(model, batch):
        calls.append(1)
        time.sleep(0.002 * (1 + runtime.rank % 2))
        if len(calls) == 9 and runtime.rank == victim:
            os.kill(os.getpid(), signal.SIGUSR1)
        return model(batch["index"])

    job = mt.Job(
        model=Counts,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        data=Indices(NUM_SAMPLES, window_samples=4),
        epochs=EPOCHS,
        batch_size=2,
        checkpoint_every=every,
        keep_checkpoints=99,
    )
    mt.train(job, parse(text, "strategy"), run_dir=str(path / name), quiet=True, resume=resume)


def between_two_shards(role):
    """The worker of this role dies when its push at step 5 has come to the first shard alone."""

    def before(effect):
        pushes = isinstance(effect, Send) and isinstance(effect.message, Push) and effect.message.step == 5
        if pushes and effect.to == 1:
            engine = runtime.engine
            engine.wait_any(
                lambda: all(op.passive for op in engine.outstanding), 10
            )  # the first shard has it
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(role, before)


def run_dying(name, text, victim):
    if runtime.rank == victim:
        whole = Worker.run
        Worker.run = lambda self: between_two_shards(whole(self))
    run(name, text)


run_calls(globals())
runtime.exit_code = 0  # of a run that was told to end, too
