"""Which device a worker computes on."""

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.training.measure import device_for
from tests import toy


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def found(device, local_rank):
    return str(device_for(toy.make_job(device=device), local_rank))


def test_workers_of_a_node_take_its_gpus_in_turn_unless_one_is_named(four_gpus):
    assert [found("auto", rank) for rank in (0, 3, 5)] == ["cuda:0", "cuda:3", "cuda:1"]
    assert [found("cuda", rank) for rank in (0, 3, 5)] == ["cuda:0", "cuda:3", "cuda:1"]
    assert {found("cuda:2", rank) for rank in range(5)} == {"cuda:2"}
    assert {found("cpu", rank) for rank in range(5)} == {"cpu"}
    with pytest.raises(UsageError, match="device='cuda:4'.* sees 4 CUDA"):
        found("cuda:4", 0)


def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("auto", 1) == "cpu"
    with pytest.raises(UsageError, match="sees 0 CUDA device.*CUDA_VISIBLE_DEVICES"):
        found("cuda", 0)
    job = toy.make_job(device="cuda")  # a simulation of it is no matter of devices
    assert (
        mt.simulate(job, mt.AllReduce(), 2, run_dir=str(tmp_path / "virtual"), quiet=True)["device"] == "cpu"
    )
    with pytest.raises(UsageError, match="--device says where workers compute, and a simulation"):
        mt.simulate(job, mt.AllReduce(), 2, device="cuda:1", quiet=True)
    for text in ("gpu", "cuda:", "cuda:-1", "mps", ""):
        with pytest.raises(UsageError, match=f'--device must be "auto", "cpu", "cuda".* got {text!r}'):
            apply_overrides(toy.make_job(), Overrides(device=text))
