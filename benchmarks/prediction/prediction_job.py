"""The job of `prediction.py`: handwritten digits by a perceptron of 340 kB.

Each batch sleeps PREDICTION_BASE_S seconds besides its own computing, so that two cores can carry four workers
("emulated compute"). With PREDICTION_SPREAD that sleep is longer or shorter by up to this share, by chance.
"""

import os
import random
import time
from functools import partial

import torch
from torch import nn

import mpitrain as mt

DATA = os.environ.get("PREDICTION_DATA", "data/digits")


def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def loss(model, batch):
    if model.training:
        spread = float(os.environ.get("PREDICTION_SPREAD", "0"))
        time.sleep(
            float(os.environ.get("PREDICTION_BASE_S", "0.06")) * random.uniform(1 - spread, 1 + spread)
        )
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def metrics(model, batch):
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float().mean()}


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=2e-3),
    data=mt.Shards(f"{DATA}/train-*.h5"),
    validate=mt.Shards(f"{DATA}/validate-*.h5"),
    metrics=metrics,
    epochs=5,
    validate_every="256 samples",  # a sixth of an epoch, for a time to the target better known than to an epoch
    batch_size=32,
)
