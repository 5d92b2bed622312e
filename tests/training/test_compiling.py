"""Compiled models: called as compiled, saved under the plain names, and as good as the plain ones."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.building.compiling import unwrap_compiled
from mpitrain.model.gradient.user_code import check_module
from tests import toy

NAMES = {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.fixture
def compiled():
    """What a backend is given to compile."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    yield backend, graphs
    torch._dynamo.reset()


def trained(path, strategy=None, **changes):
    job = toy.make_job(**{"model": toy.smooth, "validate": toy.Memory(), **changes})
    result = mt.simulate(job, strategy or mt.Sync(), 2, run_dir=str(path), quiet=True)
    return load_file(result["model"])


def check_close(found, expected):
    assert found.keys() == expected.keys() == NAMES
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Async(), mt.LocalSGD(period=2), mt.Decentralized()], ids=str
)
def test_a_job_compiles_its_model_in_place(tmp_path, strategy):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = trained(tmp_path / "compiled", strategy, compile="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # to train with, and to validate with
    check_close(found, trained(tmp_path / "plain", strategy))


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_with_torchs_own_backend(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # processes would stay
    changes = {"epochs": 1, "validate": None}
    check_close(
        trained(tmp_path / "compiled", compile=True, **changes), trained(tmp_path / "plain", **changes)
    )


def test_a_model_that_the_job_has_compiled_is_saved_under_its_plain_names(tmp_path, compiled):
    backend, graphs = compiled
    found = trained(tmp_path / "whole", model=lambda: torch.compile(toy.smooth(), backend=backend))
    assert graphs
    check_close(found, trained(tmp_path / "plain"))


def test_layers_that_the_job_has_compiled_are_saved_under_their_plain_names(tmp_path, compiled):
    backend, graphs = compiled

    def model():
        module = toy.smooth()
        module[0] = torch.compile(module[0], backend=backend)
        return module

    check_close(trained(tmp_path / "layer", model=model), trained(tmp_path / "plain"))
    assert graphs


def test_nothing_else_is_changed():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    children = list(module.modules())
    assert check_module(module) is module and unwrap_compiled(module) is module
    assert all(one is other for one, other in zip(children, module.modules(), strict=True))
    for value in (1, "", None):
        with pytest.raises(UsageError, match="compile must be True, False or the name of a backend"):
            toy.make_job(compile=value)
