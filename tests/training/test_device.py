"""Which device a worker computes on."""

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.training.measure import device_for
from tests import toy


@pytest.fixture(params=["cuda", "xpu"])
def four_gpus(monkeypatch, request):
    """A torch that was built for these devices, of which this node has four."""
    kind = request.param
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.get_device_module(kind), "is_available", lambda: True)
    monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda: 4)
    return kind


def found(device, local_rank):
    return str(device_for(toy.make_job(device=device), local_rank))


def test_workers_of_a_node_take_its_gpus_in_turn_unless_one_is_named(four_gpus):
    kind, other = four_gpus, "xpu" if four_gpus == "cuda" else "cuda"
    assert [found("auto", rank) for rank in (0, 3, 5)] == [f"{kind}:0", f"{kind}:3", f"{kind}:1"]
    assert [found(kind, rank) for rank in (0, 3, 5)] == [f"{kind}:0", f"{kind}:3", f"{kind}:1"]
    assert {found(f"{kind}:2", rank) for rank in range(5)} == {f"{kind}:2"}
    assert {found("cpu", rank) for rank in range(5)} == {"cpu"}
    for absent in (f"{kind}:4", other):
        with pytest.raises(UsageError, match=f"device='{absent}'.* sees 4 of '{kind}'"):
            found(absent, 0)


def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert found("auto", 1) == "cpu"
    for kind, variable in (
        ("cuda", "CUDA_VISIBLE_DEVICES"),
        ("xpu", "ZE_AFFINITY_MASK"),
        ("mps", "what hides"),
    ):
        with pytest.raises(UsageError, match=f"sees none; .*{variable}"):
            found(kind, 0)
    job = toy.make_job(device="cuda")  # a simulation of it is no matter of devices
    assert (
        mt.simulate(job, mt.AllReduce(), 2, run_dir=str(tmp_path / "virtual"), quiet=True)["device"] == "cpu"
    )
    with pytest.raises(UsageError, match="--device says where workers compute, and a simulation"):
        mt.simulate(job, mt.AllReduce(), 2, device="cuda:1", quiet=True)
    for text in ("gpu", "cuda:", "cuda:-1", "meta", "cpu:0", "npu", ""):
        with pytest.raises(UsageError, match=f'--device must be "auto", "cpu", a kind.* got {text!r}'):
            apply_overrides(toy.make_job(), Overrides(device=text))
