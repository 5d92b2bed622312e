"""Runs of one small job on the host and on the GPU: `gpu_jobs.py DIRECTORY JSON`, what `launch_calls` has to call."""

import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.devices import accelerator
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests.devices import tested
from tests.mpi import splits
from tests.mpi.cases import run_calls

start()
tested.kind()


def square_loss(model, batch):
    return ((model(batch["x"]).float() - batch["y"]) ** 2).mean()


def run(name, strategy, device, precision=None, **options):
    """In float64, to compare with; codecs and 16-bit numbers want a model of float32, which `precision` names."""
    fields = {} if precision is None else {"precision": precision, "loss": square_loss, "model": single}
    job = splits.changed(splits.deep_job(), device=device, batch_size=3, **fields)
    mt.train(job, parse(strategy, "strategy"), run_dir=str(Path(sys.argv[1]) / name), quiet=True, **options)


def single():
    return splits.Deep().float()


def contexts():
    print("context" if accelerator.is_begun() else "no context", flush=True)


run_calls(globals())
