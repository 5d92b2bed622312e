"""A tiny job for sweeps: one linear layer, drawn samples, with what a configuration can do wrong.

`model.hidden` of 3 is the best, and each step away from it costs 0.1 of accuracy. The configuration with `hidden` of
`raises` raises as long as there is no file FIXED, that of `kills` kills its process.
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import mpitrain as mt

model = mt.Options("model", hidden=3, raises=0, kills=0)


def loss(module, batch):
    if model.hidden == model.raises and not Path("FIXED").exists():
        raise RuntimeError("planted")
    if model.hidden == model.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    return (module(batch["x"]) ** 2).mean()


def metrics(module, batch):
    return {"accuracy": torch.tensor(1.0 - abs(model.hidden - 3) / 10)}


job = mt.Job(
    model=lambda: nn.Linear(3, model.hidden),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=mt.Synthetic(32, x=((3,), "float32")),
    validate=mt.Synthetic(8, x=((3,), "float32")),
    metrics=metrics,
    batch_size=8,
    epochs=1,
)
