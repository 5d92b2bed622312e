"""A module whose large tensors are made later has the bits that its constructor would have given it."""

import copy
import functools
import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mpitrain.model.building import deferred
from mpitrain.model.building.deferred import SMALL, CannotDefer, Deferred, held_by


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch):
    """As in a process of a user's: `build` freezes what is older, and thaws it."""
    gc.unfreeze()
    monkeypatch.setattr(deferred, "_frozen_by_others", False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64, padding_idx=0)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.frozen = nn.Parameter(torch.rand_like(self.scale), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)) == 0)
        self.register_buffer("shared", self.scale.data)
        self.register_buffer("steps", torch.arange(2000).view(2, -1).t()[::2])
        self.apply(self.begin)

    def begin(self, layer):
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            layer.weight.data[3:5, 1:7].zero_()


class Outside(nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(64, 64), torch.randn(64, 64)


def layers():
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(64, 64),
            "embedding": nn.Embedding(64, 64),
            "norm": nn.LayerNorm([32, 64]),
            "transformer": nn.TransformerEncoder(block, 2),
            "conv": nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(2048)),
            "transposed": nn.ConvTranspose1d(32, 32, 5),
            "lstm": nn.LSTM(64, 64, 2, bidirectional=True),
            "gru": nn.GRUCell(64, 64),
            "attention": nn.MultiheadAttention(64, 4, kdim=32, vdim=48),
            "bilinear": nn.Bilinear(16, 16, 16),
        }
    )


def initialised(function, *options):
    def make():
        layer = nn.Linear(64, 48)
        function(layer.weight, *options)
        return layer

    return make


def parametrized():
    weight, spectral = parametrizations.weight_norm, parametrizations.spectral_norm
    return nn.Sequential(
        weight(nn.Linear(64, 64)), spectral(nn.Linear(64, 64)), parametrizations.orthogonal(nn.Linear(64, 64))
    )


def converted():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).double().to(torch.bfloat16).to("cpu").cpu()


def copied():
    layer = nn.Linear(64, 64)
    layer.weight.cpu().detach().to("cpu").mul_(2)
    layer.weight.data.to("cpu", copy=True).zero_()
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
    return nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(2))])


def reading():
    layer = nn.Linear(64, 64)
    weight = layer.weight.detach()
    layer.bias.data.fill_(weight.sum().item() + float(weight[0, 0]) + len(weight))
    if layer.weight.device.type == "cpu" and not layer.weight.is_meta and bool((layer.weight > -9).all()):
        layer.weight.data.add_(layer.weight.abs().max())
    return layer


def from_numpy():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    layers[0].weight.data.copy_(torch.from_numpy(np.random.standard_normal((64, 64))))
    layers[1].bias.data.fill_(random.random())
    return layers


def to_numpy():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    layers[0].weight.detach().numpy()[:] *= 2
    return layers


def loaded():
    one, other = nn.Linear(64, 64), nn.Linear(64, 64)
    with torch.no_grad():
        state = {name: tensor + 1 for name, tensor in one.state_dict().items()}
    other.load_state_dict(state)
    return other


def seen_forward():
    """Finds the width of a layer by a forward pass."""
    first = nn.Sequential(nn.Conv1d(8, 64, 5), nn.Flatten())
    return nn.Sequential(first, nn.Linear(first(torch.zeros(1, 8, 20)).shape[1], 8), nn.Dropout())


def drawing_by_numbers():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.bernoulli(torch.sigmoid(layer.weight)) * torch.rand(64, 64))
    layer.bias.data.copy_(torch.multinomial(layer.weight.abs().sum(0) + 1, 64, True))
    return layer


def half_done():
    """A function of torch's that draws before it reads: it is done again from the state before."""
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.copy_(
            nn.functional.dropout(layer.weight, 0.5) + torch.svd_lowrank(layer.weight, 3)[0][:, :1]
        )
    return layer


def in_another_dtype(dtype):
    """As models in bfloat16 do it: what names no dtype has the default of its time."""

    def make():
        torch.set_default_dtype(dtype)
        try:
            layer = nn.Linear(64, 64)
            layer.scale = nn.Parameter(torch.ones(2048))
            layer.noise = nn.Parameter(torch.randn(2048) * 0.02)
            layer.register_buffer("angles", torch.arange(2048) / 3)
        finally:
            torch.set_default_dtype(torch.float32)
        return layer

    return make


MAKERS = {
    "bfloat16": in_another_dtype(torch.bfloat16), "float64": in_another_dtype(torch.float64),
    "tied": Tied, "layers": layers, "orthogonal": initialised(nn.init.orthogonal_, 2.0),
    "kaiming": initialised(nn.init.kaiming_normal_), "xavier": initialised(nn.init.xavier_uniform_),
    "sparse": initialised(nn.init.sparse_, 0.3), "eye": initialised(nn.init.eye_), "parametrized": parametrized,
    "converted": converted, "copied": copied, "reading": reading, "seen_forward": seen_forward, "outside": Outside,
    "from_numpy": from_numpy, "to_numpy": to_numpy, "loaded": loaded, "drawing_by_numbers": drawing_by_numbers,
    "half_done": half_done,
}  # fmt: skip
AT_ONCE = ("outside", "from_numpy", "to_numpy", "drawing_by_numbers", "half_done", "parametrized")


def seed():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("name", MAKERS)
def test_same_bits_and_random_numbers(name):
    seed()
    whole, after = MAKERS[name](), states()
    seed()
    deferred = Deferred()
    module = deferred.build(MAKERS[name])
    assert states() == after
    large = [tensor for tensor in held_by(module) if tensor.numel() >= SMALL]
    assert large and (name in AT_ONCE or all(tensor.is_meta for tensor in large)), deferred.built_at_once
    assert bool(deferred.built_at_once) == any(not tensor.is_meta for tensor in large) or name == "outside"
    for part in reversed(list(module.modules())):
        deferred.fill(held_by(part))
    assert states() == after
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    assert names == [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    found = module.state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    for one, other in zip(whole.parameters(), module.parameters(), strict=True):
        assert (one.requires_grad, one.stride()) == (other.requires_grad, other.stride())


def test_a_layer_is_made_without_the_others():
    deferred = Deferred()
    module = deferred.build(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    parameters = list(module.parameters())
    deferred.fill(held_by(module[2]))
    assert [layer.weight.is_meta for layer in module] == [True, True, False, True]
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    made = deferred.made(module[0].weight)
    assert module[0].weight.is_meta and not made.is_meta
    deferred.fill(held_by(module))
    assert torch.equal(module[0].weight, made)


def test_what_shares_memory_still_shares_it():
    deferred = Deferred()
    module = deferred.build(Tied)
    deferred.fill([module.shared])
    assert module.head.weight is module.embedding.weight and module.head.weight.is_meta
    assert module.scale.data_ptr() == module.shared.data_ptr()


def test_tensors_outside_are_real():
    module = Deferred().build(Outside)
    assert module.linear.weight.is_meta and not module.mask.is_meta


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_what_would_lose_its_gradient_is_refused():
    with pytest.raises(CannotDefer, match="gradient function"):
        Deferred().build(lambda: nn.utils.weight_norm(nn.Linear(64, 64)))


def test_an_error_of_the_constructor_is_its_own():
    def wrong():
        return nn.Linear(64, 64).weight @ torch.zeros(3, 3)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Deferred().build(wrong)


def test_modules_compute_after_they_have_been_made():
    deferred = Deferred()
    module = deferred.build(layers)
    deferred.fill(held_by(module))
    module["lstm"](torch.zeros(3, 2, 64))[0].sum().backward()
    module["transformer"](torch.zeros(2, 5, 64)).sum().backward()
    assert module["lstm"].weight_hh_l1.grad is not None


def test_a_failed_build_leaves_real_tensors_in_the_caches_of_the_user():
    """The constructor that runs next finds them there."""

    @functools.lru_cache
    def mask(size):
        return torch.ones(size, size).tril()

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("mask", mask(64))
            self.turned = self.linear.weight.t()  # has a gradient function

    deferred = Deferred()
    with pytest.raises(CannotDefer):
        deferred.build(Caching)
    deferred.make_leftovers()
    assert torch.equal(Caching().mask, torch.ones(64, 64).tril())


def test_what_others_have_frozen_stays_so_and_is_counted_once(monkeypatch):
    """To count it is a walk through all of it."""
    counts, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    Deferred().build(Tied)
    assert counts == [0] and count() == 0
    gc.freeze()
    for _ in range(2):
        Deferred().build(Tied)
    assert len(counts) == 2 and count() >= counts[1] > 0
