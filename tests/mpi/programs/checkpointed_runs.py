"""Runs that write checkpoints, or go on from one."""

import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls


def train(name, text, optimizer, resume=None, linear=False):
    changes = {"model": toy.linear_float32, "loss": toy.linear_loss} if linear else {}
    job = toy.make_job(
        epochs=6,
        batch_size=4,
        optimizer=getattr(toy, optimizer),
        checkpoint_every="never" if resume else "96",
        keep_checkpoints=99,
        schedule=mt.Decay(every=2, by=0.5),
        data=toy.Memory(window_samples=4),
        **changes,
    )
    mt.train(job, parse(text, "strategy"), run_dir=str(Path(sys.argv[1]) / name), quiet=True, resume=resume)


run_calls(globals())
