"""The models whose steps benchmarks time: one whose time goes into parameters, and one whose goes into convolutions."""

from __future__ import annotations

from torch import nn

BATCH = 64


def mlp() -> nn.Module:
    """6.3 million parameters in three layers."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def cnn() -> nn.Module:
    """0.4 million parameters, most of the time in convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 80), nn.ReLU(), nn.Linear(80, 10),
    )  # fmt: skip


MODELS = {"mlp": (mlp, (1024,)), "cnn": (cnn, (3, 32, 32))}
