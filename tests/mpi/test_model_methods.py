"""Losses that ask more of a model than to be called: methods, attributes, `model.module`, single layers, weights."""

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.model.gradient.loss_pass import LossPass, naming_itself, passed
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import assert_passed, case_names, launch


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launch(2, "model_methods", cwd=tmp_path_factory.mktemp("methods"), timeout_s=300)


@pytest.fixture(scope="module")
def own_loops(tmp_path_factory):
    return launch(2, "wrapped_methods", cwd=tmp_path_factory.mktemp("loops"), timeout_s=300)


@pytest.mark.parametrize("case", case_names("wrapped_methods"))
def test_a_wrapped_loop_trains_as_one_process_whatever_it_calls(own_loops, case):
    assert_passed(own_loops, case)


@pytest.mark.parametrize("case", case_names("model_methods"))
def test_ranks_train_as_one_process_whatever_the_loss_calls(two_ranks, case):
    assert_passed(two_ranks, case)


def through_module(model, batch):
    return toy.square_loss(model.module, batch) + 0.01 * model.module[0].weight.square().sum()


def directly(model, batch):
    return toy.square_loss(model, batch) + 0.01 * model[0].weight.square().sum()


@pytest.mark.parametrize(
    "text", ["allreduce()", "async()", "elastic()", "localsgd(period=2)", "decentralized()"]
)
def test_the_model_answers_to_module_under_every_family(text, tmp_path):
    models = []
    for name, loss in (("module", through_module), ("plain", directly)):
        job = toy.make_job(loss=loss, validate=toy.Memory())
        mt.simulate(job, parse(text, "strategy"), 2, run_dir=str(tmp_path / name), quiet=True)
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_a_model_names_itself_for_as_long_as_its_loss_runs():
    model = toy.smooth()
    with naming_itself(model), naming_itself(model):
        assert model.module is model and len(list(model.modules())) == 4
    assert not hasattr(model, "module") and passed(LossPass(model)) is model
    model.module = nn.Linear(1, 1)
    with naming_itself(model):
        assert isinstance(model.module, nn.Linear)
    assert torch.equal(
        LossPass(model)(lambda one, x: one.module(x), torch.ones(1)), model.module(torch.ones(1))
    )
