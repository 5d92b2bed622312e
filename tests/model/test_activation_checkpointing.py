"""Activations that are computed again: the same gradients to the bit, the same statistics, less kept."""

import copy

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.building.activation_checkpointing import checkpoint_activations
from tests import toy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 5)
        )  # fmt: skip
        self.num_calls = 0

    def forward(self, x, scale=1.0):
        self.num_calls += 1
        return x + scale * self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def trained(module, kept=None):
    """Gradients and buffers after two steps; `kept`: takes up the bytes that are saved for the backward pass."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        torch.manual_seed(step)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.numel()), t)[1] if kept is not None else t, lambda t: t
        ):
            module(x).square().mean().backward()
    return [p.grad for p in module.parameters()] + list(module.buffers())


@pytest.mark.parametrize("which", [True, ["blocks.*"], ["blocks.0", "head"]], ids=str)
def test_gradients_and_statistics_are_those_of_the_plain_model_to_the_bit(which):
    torch.manual_seed(0)
    plain = Net()
    layered = copy.deepcopy(plain)
    checkpoint_activations(layered, which)
    assert layered.state_dict().keys() == plain.state_dict().keys()
    twin = copy.deepcopy(layered)  # as local SGD makes its workers
    kept, all_kept = [], []
    expected = trained(plain, all_kept)
    for module in (layered, twin):
        kept.clear()
        assert all(torch.equal(a, b) for a, b in zip(trained(module, kept), expected, strict=True))
        assert sum(kept) < 0.6 * sum(all_kept)
        assert module.blocks[0].num_calls == 4 and plain.blocks[0].num_calls == 2
    assert isinstance(layered.blocks[0], Block) and type(layered.blocks[0]).__name__ == "Block"
    with torch.no_grad():
        layered(torch.zeros(8, 5))
    assert layered.blocks[0].num_calls == 5


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(
        UsageError, match=r"activation_checkpointing: 'body.\*' matches none of blocks, blocks.0"
    ):
        checkpoint_activations(Net(), ["body.*"])
    for value in ("blocks", [3], None):
        with pytest.raises(UsageError, match="activation_checkpointing must be True, False or names"):
            toy.make_job(activation_checkpointing=value)


def test_a_job_trains_with_it(tmp_path):
    found = [
        mt.simulate(toy.make_job(model=Net, activation_checkpointing=which), mt.LocalSGD(period=2), 2,
                    run_dir=str(tmp_path / str(which)), quiet=True)["loss_curve"]
        for which in (False, True)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("model", [toy.perceptron, toy.normed], ids=lambda model: model.__name__)
def test_a_model_that_is_compiled_too_is_trained_to_the_bits_of_the_plain_one(tmp_path, model):
    """With random numbers, and with statistics that move once."""
    models = []
    for name, options in (("plain", {}), ("both", {"activation_checkpointing": True, "compile": "eager"})):
        torch._dynamo.reset()
        job = toy.make_job(model=model, epochs=1, **options)
        mt.simulate(job, mt.Sync(), 2, run_dir=str(tmp_path / name), quiet=True)
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]
