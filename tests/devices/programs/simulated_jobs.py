"""Runs of one small job on the host and on the simulated accelerator: `simulated_jobs.py DIRECTORY JSON`, what
`call_on` has to call."""

import sys
from pathlib import Path

from torch import nn

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy
from tests.devices import simulated
from tests.mpi import splits
from tests.mpi.cases import run_calls

simulated.be_the_same_everywhere()
if "threads" not in sys.argv[2]:
    start()
simulated.load()
SLOW = 0.01  # small enough for the job to learn


def square_loss(model, batch):
    return ((model(batch["x"]).float() - batch["y"]) ** 2).mean()


def prediction(model, batch):
    return model(batch["x"].double())


def normed():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


class Narrow(nn.Sequential):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def narrow():
    return Narrow(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()


def single():
    return splits.Deep().float()


MODELS = {"single": single, "normed": normed, "narrow": narrow}


def job_of(device, model=""):
    """In float64; codecs want a model of float32, which is named."""
    fields = {"loss": square_loss, "model": MODELS[model]} if model else {}
    return splits.changed(
        splits.deep_job(),
        device=device,
        batch_size=3,
        predict=prediction,
        data=toy.Memory(num_samples=24),
        **fields,
    )


def run(name, strategy, device, model="", **options):
    folder = str(Path(sys.argv[1]) / name)
    mt.train(
        job_of(device, model), parse(strategy, "strategy"), run_dir=folder, quiet=True, lr=SLOW, **options
    )


def predict(name, device):
    """With the model of a run, on the data that it was validated with."""
    folder = Path(sys.argv[1])
    mt.predict(folder / name, toy.Memory(), folder / f"{device}.h5", job=job_of(device))


run_calls(globals())
