"""A small Inception network on 32x32 images of ten kinds: generated shapes, clothes (Fashion-MNIST), or CIFAR-10.

mpitrain data pack jobs/cnn.py:shapes data/shapes
mpitrain launch -n 4 train jobs/cnn.py
mpitrain launch -n 4 train jobs/cnn.py --strategy "async(servers=1)"

mpitrain data pack jobs/cnn.py:fashion data/fashion               # Debian's package dataset-fashion-mnist
mpitrain launch -n 4 train jobs/cnn.py --set data.folder=data/fashion --epochs 5 --target accuracy=0.8
CNN_CIFAR=cifar-10-batches-bin mpitrain data pack jobs/cnn.py:cifar data/cifar    # CIFAR-10, "binary version"
mpitrain launch -n 4 train jobs/cnn.py --set data.folder=data/cifar --epochs 30 --target accuracy=0.6
"""

import gzip
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mpitrain as mt

CIFAR = os.environ.get("CNN_CIFAR", "")
FASHION = os.environ.get("CNN_FASHION", "/usr/share/datasets/fashion-mnist")
SIZE = 32
folder = mt.Options("data", folder="data/shapes").folder
KINDS = ("disc", "ring", "square", "frame", "cross", "saltire", "triangle", "diamond", "bars", "dots")


def mask(kind: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Where the shape is, in coordinates of -1 to 1 across it."""
    radius, side, diamond = np.hypot(u, v), np.maximum(abs(u), abs(v)), abs(u) + abs(v)
    return {
        "disc": radius < 1,
        "ring": (radius < 1) & (radius > 0.6),
        "square": side < 0.9,
        "frame": (side < 0.9) & (side > 0.55),
        "cross": (side < 1) & (np.minimum(abs(u), abs(v)) < 0.25),
        "saltire": (side < 1) & (abs(abs(u) - abs(v)) < 0.3),
        "triangle": (v < 0.8) & (v > 2 * abs(u) - 1),
        "diamond": diamond < 1,
        "bars": (side < 1) & (np.floor(2.5 * (u + 1)) % 2 == 0),
        "dots": np.hypot((u + 1) % 1 - 0.5, (v + 1) % 1 - 0.5) < (side < 1) * 0.35,
    }[kind]


def shapes() -> dict[str, np.ndarray]:
    """A shape of random place, size and colour on a background of another, under noise: x float32 (3, 32, 32), y the
    number of its kind."""
    count, draw = int(os.environ.get("CNN_SAMPLES", "5000")), np.random.default_rng(0)
    labels = draw.integers(0, len(KINDS), count)
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    images = np.empty((count, 3, SIZE, SIZE), np.float32)
    for image, label in zip(images, labels, strict=True):
        half, (x, y) = draw.uniform(6, 11), draw.uniform(11, SIZE - 11, 2)
        inside = mask(KINDS[label], (columns - x) / half, (rows - y) / half)
        front, back = draw.uniform(0.5, 1.0, 3), draw.uniform(0.0, 0.5, 3)
        if draw.random() < 0.5:
            front, back = back, front
        image[:] = np.where(inside, front[:, None, None], back[:, None, None]) - 0.5
    return {"x": images + draw.normal(0, 0.1, images.shape).astype(np.float32), "y": labels}


def cifar() -> Iterator[dict[str, np.ndarray]]:
    """The records of the training files: a byte of the label and 3,072 of the image."""
    for path in sorted(Path(CIFAR).glob("data_batch_*.bin")):
        for record in np.fromfile(path, np.uint8).reshape(-1, 3073):
            image = record[1:].reshape(3, SIZE, SIZE).astype(np.float32) / 255 - 0.5
            yield {"x": image, "y": np.int64(record[0])}


def fashion() -> dict[str, np.ndarray]:
    """The 10,000 test images of Fashion-MNIST (Xiao et al. 2017): grey 28x28 in a frame, in three channels."""
    read = {}
    for name, head in (("images-idx3", 16), ("labels-idx1", 8)):  # bytes before the data
        packed = (Path(FASHION) / f"t10k-{name}-ubyte.gz").read_bytes()
        read[name] = np.frombuffer(gzip.decompress(packed), np.uint8, offset=head)
    images = np.pad(read["images-idx3"].reshape(-1, 1, 28, 28), ((0, 0), (0, 0), (2, 2), (2, 2)))
    return {
        "x": images.repeat(3, axis=1).astype(np.float32) / 255 - 0.5,
        "y": read["labels-idx1"].astype(np.int64),
    }


def convolution(num_in: int, num_out: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, size, padding=size // 2), nn.ReLU())


class Inception(nn.Module):
    """Branches of 1x1, 3x3 and 5x5 convolutions and of pooling, side by side; a quarter of the channels each."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        part, few = num_out // 4, max(8, num_in // 4)
        self.branches = nn.ModuleList(
            [
                convolution(num_in, part, 1),
                nn.Sequential(convolution(num_in, few, 1), convolution(few, part, 3)),
                nn.Sequential(convolution(num_in, few, 1), convolution(few, part, 5)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), convolution(num_in, part, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def model() -> nn.Module:
    stem = [convolution(3, 24, 3), nn.MaxPool2d(2)]
    blocks = [Inception(24, 48), nn.MaxPool2d(2), Inception(48, 96), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, *blocks, nn.Flatten(), nn.Linear(96 * 4 * 4, len(KINDS)))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float().mean()}


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=2e-3),
    data=mt.Shards(f"{folder}/train-*.h5"),
    validate=mt.Shards(f"{folder}/validate-*.h5"),
    metrics=metrics,
    epochs=3,
    batch_size=16,
    target={"accuracy": 0.97},
    synthetic=mt.Synthetic(4096, x=((3, SIZE, SIZE), "float32"), y=((), "int64", len(KINDS))),
)
