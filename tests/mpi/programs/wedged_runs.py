"""Runs that are wedged: by order, or in the loss where split models take none."""

import sys
import time
from pathlib import Path

from torch import nn

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls

runtime, path = start(), Path(sys.argv[1])


def normed():  # running statistics change in the forward pass, which is computed again
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


calls: list[int] = []


def loss(model, batch):
    calls.append(1)
    while len(calls) == 9 and runtime.rank == 3:
        time.sleep(0.1)  # in loss
    return toy.square_loss(model, batch)


def train(name, text, **options):
    stuck = options.get("inject") == ["loss"]
    if stuck:
        del options["inject"]
        calls.clear()
    job = toy.make_job(
        model=normed,
        optimizer=toy.adam,
        epochs=5,
        batch_size=4,
        checkpoint_every="never",
        loss=loss if stuck else toy.square_loss,
    )
    mt.train(job, parse(text, "strategy"), run_dir=str(path / name), quiet=True, **options)


run_calls(globals())
