"""PixelCNN on handwritten digits: a model of images, pixel after pixel, measured in bits per dimension.

mpitrain data pack digits data/digits
mpitrain launch -n 4 train jobs/pixelcnn.py
mpitrain launch -n 4 train jobs/pixelcnn.py --strategy "async(servers=1)"
python jobs/pixelcnn.py runs/pixelcnn-DATE-TIME     # prints digits that the model has drawn

Every pixel has one of 17 levels, so a model that knows nothing needs log2(17) = 4.09 bits for each. One that knows
only how often each pixel has each level, and nothing of those beside it, cannot do with less than `independent_bits`.
"""

import math
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import mpitrain as mt

LEVELS = 17
size = mt.Options("model", width=48, layers=4)


class MaskedConv(nn.Conv2d):
    """A convolution that sees the pixels above and to the left alone; `itself`: and the pixel in the middle.

    van den Oord et al., "Pixel Recurrent Neural Networks", 2016.
    """

    mask: torch.Tensor

    def __init__(self, num_in: int, num_out: int, size: int, itself: bool):
        super().__init__(num_in, num_out, size, padding=size // 2)
        seen = torch.arange(size * size).reshape(size, size)
        self.register_buffer("mask", (seen < size * size // 2 + itself).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return x + super().forward(x)


def model() -> nn.Module:
    """From images (batch, 1, 8, 8) in [0, 1] to logits (batch, 17, 8, 8) of every pixel's level."""
    width = size.width
    blocks = [
        Residual(nn.ReLU(), MaskedConv(width, width, 3, True), nn.ReLU(), nn.Conv2d(width, width, 1))
        for _ in range(size.layers)
    ]
    return nn.Sequential(MaskedConv(1, width, 5, False), *blocks, nn.ReLU(), nn.Conv2d(width, LEVELS, 1))


def levels(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] * (LEVELS - 1)).round().clamp(0, LEVELS - 1).long()


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), levels(batch["x"]))


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`independent_bits`: the entropy of each pixel alone, by its counts in these very images."""
    shares = nn.functional.one_hot(levels(batch["x"]), LEVELS).double().mean(dim=0)
    independent = torch.special.entr(shares).sum(dim=-1).mean()
    bits = {"bits_per_dimension": loss(model, batch), "independent_bits": independent}
    return {name: nats / math.log(2) for name, nats in bits.items()}


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    data=mt.Shards("data/digits/train-*.h5"),
    validate=mt.Shards("data/digits/validate-*.h5"),
    metrics=metrics,
    epochs=10,
    batch_size=16,
    target={"bits_per_dimension": "<2"},
    synthetic=mt.Synthetic(4096, x=((1, 8, 8), "float32")),
)

if __name__ == "__main__":
    trained, images = mt.load(sys.argv[1]), torch.zeros(4, 1, 8, 8)
    with torch.no_grad():
        for row, column in torch.cartesian_prod(torch.arange(8), torch.arange(8)):
            chances = trained(images)[:, :, row, column].softmax(dim=1)
            images[:, 0, row, column] = torch.multinomial(chances, 1).squeeze(1) / (LEVELS - 1)
    for row in range(8):
        print("   ".join("".join(" .:+*#"[int(5 * one)] * 2 for one in image[0, row]) for image in images))
