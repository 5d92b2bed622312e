"""A model with methods, and losses that ask more of it than to be called."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Autoencoder(nn.Module):
    """With methods, a plain attribute, a parameter of its own, and a weight that is used twice."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(5, self.width), nn.Linear(self.width, 1)
        self.scale = nn.Parameter(torch.ones(self.width))
        self.double()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.scale

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.out(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def through_methods(model: Any, batch: Any) -> torch.Tensor:
    code = model.encode(batch["x"].double())
    assert code.shape[1] == model.width
    return (model.decode(code) - batch["y"]).square().mean() + 0.1 * code.square().mean()


def through_module(model: Any, batch: Any) -> torch.Tensor:
    return (model.module.decode(model.module.encode(batch["x"].double())) - batch["y"]).square().mean()


def penalised(model: Any, batch: Any) -> torch.Tensor:
    """Weights that the forward pass uses, too, and a head that is tied to the first layer."""
    tied = model.encode(batch["x"].double()) @ model.inner.weight
    penalty = sum(one.square().sum() for name, one in model.named_parameters() if "weight" in name)
    return (
        (tied - batch["x"]).square().mean()
        + (model(batch["x"].double()) - batch["y"]).square().mean()
        + penalty / 9
    )


def part_alone(model: Any, batch: Any) -> torch.Tensor:
    """A layer without the rest, twice, as contrastive losses do."""
    one, other = (model.encode(scale * batch["x"].double()) for scale in (1.0, 0.5))
    return (one - other + 1).square().mean() + (model.out(one) - batch["y"]).square().mean()


def computed_again(model: Any, batch: Any) -> torch.Tensor:
    """With a part in the middle whose graph the backward pass makes."""
    hidden = model.inner(batch["x"].double())
    code = checkpoint(lambda x: torch.tanh(x) * model.scale, hidden, use_reentrant=True)
    return (model.decode(code) - batch["y"]).square().mean()


def encoder_alone(model: Any, batch: Any) -> torch.Tensor:
    """Which leaves the other layer out."""
    return (model.encode(batch["x"].double()) - 1).square().mean()
