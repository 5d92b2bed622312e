"""A module whose large tensors are made later has the bits that its constructor would have given it."""

import pytest
import torch
from torch import nn

from mpitrain.model.deferred import CannotDefer, Deferred


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64, padding_idx=0)
        self.recurrent = nn.LSTM(64, 64, 2)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128)
        self.head = nn.Linear(64, 100)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))
        self.apply(self.begin)

    def begin(self, layer):
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            layer.bias.data.zero_()


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(64, 64)


def orthogonal():
    layer = nn.Linear(64, 64)
    nn.init.orthogonal_(layer.weight)
    return layer


def reading():
    layer = nn.Linear(64, 64)
    layer.bias.data.fill_(layer.weight.sum().item())
    return layer


def test_same_bits_and_random_numbers():
    torch.manual_seed(3)
    whole, state = Several(), torch.get_rng_state()
    torch.manual_seed(3)
    deferred = Deferred()
    module = deferred.build(Several)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.layer.linear1.weight.is_meta
    for layer in reversed(list(module.children())):
        deferred.fill(layer, torch.device("cpu"))
    deferred.fill(module, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.head.weight is module.embedding.weight
    found = module.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found[name], tensor), name
    module.recurrent(torch.zeros(3, 2, 64))


@pytest.mark.parametrize("make", [Keeping, orthogonal, reading])
def test_what_cannot_be_recorded_is_refused(make):
    with pytest.raises((CannotDefer, RuntimeError)):
        Deferred().build(make)
