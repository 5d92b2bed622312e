"""A deep LSTM that predicts the next character of Python's own documentation; its layers are split over ranks.

mpitrain data pack topics data/topics
mpitrain launch -n 2 train jobs/charnn.py
mpitrain launch -n 4 train jobs/charnn.py --strategy "pipeline(stages=2,microbatches=8)"   # two pipelines
CHARNN_HIDDEN=64 CHARNN_LAYERS=2 mpitrain train jobs/charnn.py --strategy allreduce        # a small one, not split
"""

import os
from functools import partial

import torch
from torch import nn

import mpitrain as mt

HIDDEN = int(os.environ.get("CHARNN_HIDDEN", "128"))
LAYERS = int(os.environ.get("CHARNN_LAYERS", "6"))


class Recurrent(nn.LSTM):
    """An LSTM layer that adds its outputs to its inputs, (batch, characters, hidden): deep stacks learn so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)[0]


def model() -> nn.Module:
    layers = [Recurrent(HIDDEN, HIDDEN, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(128, HIDDEN), *layers, nn.Linear(HIDDEN, 128))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    text = batch["text"].long()
    return nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    text = batch["text"].long()
    return {"accuracy": (model(text[:, :-1]).argmax(dim=2) == text[:, 1:]).float().mean()}


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=2e-3),
    data=mt.Shards("data/topics/train-*.h5"),
    validate=mt.Shards("data/topics/validate-*.h5"),
    metrics=metrics,
    epochs=2,
    batch_size=32,
    target={"accuracy": 0.6},
    strategy=mt.Pipeline(stages=2, microbatches=4),
    synthetic=mt.Synthetic(4096, text=((65,), "uint8", 128)),
)
