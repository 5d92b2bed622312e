"""Runs start from the weights they are given under every strategy, and `mt.load` gives back what they made of them."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from tests.mpi.cases import launch_program
from tests.mpi.start_files import JOB, STRATEGIES, write_start


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    path = tmp_path_factory.mktemp("initial")
    (path / "job.py").write_text(JOB)
    weights = write_start(path)
    launch_program(3, "initial_weights", str(path), str(path / "job.py"), cwd=path, timeout_s=300).check()
    return path, weights, json.loads((path / "found.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_at_a_rate_of_zero_the_model_is_the_file_buffers_included(started, strategy):
    _, weights, found = started
    assert set(found[strategy]["0.0"]) == weights.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_moves_all_but_the_frozen_layer_and_the_buffer(started, strategy):
    assert set(started[2][strategy]["None"]) == {"0.weight", "0.bias", "2.by"}


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(started):
    code, said = started[2]["refused"]
    assert code == 2
    for text in ("3.bias", "head", "5.weight (2, 6), in the model (1, 6)", "--init-partial"):
        assert text in said


def test_the_trained_module_is_loaded_back(started):
    path = started[0] / "run-0-None"
    module = mt.load(path, job=started[0] / "job.py")
    assert not module.training and not module[0].weight.requires_grad
    for name, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(module.state_dict()[name], tensor)
