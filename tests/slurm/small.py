"""The digits job, cut down to what shows that it trains: a model without convolutions, two passes, and a target that
they reach. Where READS names a folder, every rank that computes writes down there which shards it has open."""

import dataclasses
import os
import runpy
from pathlib import Path

from torch import nn

_digits = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "digits.py"))["job"]


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model, batch):
    if folder := os.environ.pop("READS", ""):
        links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        shards = [link for link in links if "/train-" in link and link.endswith(".h5")]
        name = f"{os.environ['SLURMD_NODENAME']}-{os.getpid()}"
        Path(folder, name).write_text("\n".join(shards))
    return _digits.loss(model, batch)


job = dataclasses.replace(_digits, model=model, loss=loss, epochs=2, target={"accuracy": 0.8})
