"""16-bit numbers in forward passes and losses: as good a model for the same samples, and 32 bits in everything that is
kept or sent."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.model.gradient import precision
from mpitrain.training import validate
from tests import toy
from tests.mpi import splits
from tests.mpi.cases import launch_program

ALL_VIRTUAL = [mt.Sync(), mt.Async(servers=2), mt.Elastic(), mt.LocalSGD(period=2), mt.Decentralized()]


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    path = tmp_path_factory.mktemp("topics")
    splits.pack_some_topics(path)
    return path


def simulated(path, job, strategy, workers=2):
    return mt.simulate(job, strategy, workers, run_dir=str(path), quiet=True)


@pytest.mark.parametrize("strategy", [mt.Async(), mt.LocalSGD(period=2)], ids=str)
def test_characters_in_bfloat16_reach_the_loss_of_float32_in_virtual_time(topics, tmp_path, strategy):
    jobs = {name: splits.small_character_job(topics, precision=name) for name in ("float32", "bfloat16")}
    check_close(*(simulated(tmp_path / name, job, strategy) for name, job in jobs.items()))


def test_characters_in_bfloat16_reach_the_loss_of_float32_under_allreduce(topics):
    launch_program(2, "precision_runs", str(topics), cwd=topics, timeout_s=300).check()
    runs = (topics / "float32", topics / "bfloat16")
    check_close(*(json.loads((run / "result.json").read_text()) for run in runs))


def check_close(full, half):
    assert (full["precision"], half["precision"]) == ("float32", "bfloat16")
    assert full["samples"] == half["samples"] > 400
    losses = [one["metrics"]["validation_loss"] for one in (full, half)]
    assert 0 < abs(losses[1] - losses[0]) < 0.01 * losses[0]
    assert losses[0] < 3.5  # or nothing has been learned: log(128) is 4.85


@pytest.mark.parametrize("strategy", ALL_VIRTUAL, ids=str)
def test_only_what_is_computed_has_16_bits(tmp_path, strategy):
    seen = set()

    def loss(model, batch):
        output = model(batch["x"])
        seen.add((output.dtype, model[0].weight.dtype))
        return ((output - batch["y"]) ** 2).mean()

    job = toy.make_job(loss=loss, precision="bfloat16", validate=toy.Memory())
    result = simulated(tmp_path, job, strategy)
    assert seen == {(torch.bfloat16, torch.float32)}
    assert {tensor.dtype for tensor in load_file(result["model"]).values()} == {torch.float32}


class Overflows(torch.autograd.Function):
    """Gradients of more than 60000 are infinite, as in float16."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(gradient.abs() > 60000.0, gradient.sign() * float("inf"), gradient)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("strategy", ALL_VIRTUAL, ids=str)
def test_a_step_that_overflows_is_done_again_with_a_smaller_scale(tmp_path, monkeypatch, strategy, batches):
    """What float16 does on a GPU, on which this was not run: here with an autocast that does nothing. No sample is
    lost, and as scales are powers of 2, no bit differs."""

    def loss(model, batch):
        return toy.square_loss(
            lambda x: Overflows.apply(model(x)) if torch.is_grad_enabled() else model(x), batch
        )

    changes = {"model": toy.normed, "accumulate": batches, "loss": loss}
    expected = simulated(tmp_path / "float32", toy.make_job(**changes), strategy)
    monkeypatch.setattr(validate, "check_precision", lambda job, on_cuda: None)
    monkeypatch.setattr(
        "mpitrain.model.gradient.user_code.autocast", lambda *_: precision.contextlib.nullcontext()
    )
    monkeypatch.setattr(precision, "START", 2.0**30)
    found = simulated(tmp_path / "float16", toy.make_job(precision="float16", **changes), strategy)
    assert found["nonfinite"] == expected["nonfinite"] == 0 and found["samples"] == expected["samples"]
    tensors = load_file(found["model"])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(expected["model"]).items())


def test_the_scale_grows_again_and_is_not_to_blame_for_everything():
    scale = precision.LossScale()
    assert scale.factor == 2.0**16 and scale.shrink() and scale.factor == 2.0**15
    for _ in range(2000):
        scale.count_step()
    assert scale.factor == 2.0**16
    assert [scale.shrink() for _ in range(18)] == [*[True] * 16, False, True]


def test_what_a_precision_cannot_be_used_for_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Job: precision='bfloat'; did you mean 'bfloat16'"):
        toy.make_job(precision="bfloat")
    with pytest.raises(UsageError, match='scales the loss on an accelerator.*use "bfloat16"'):
        simulated(tmp_path / "cpu", toy.make_job(precision="float16"), mt.Sync())
    doubles = toy.make_job(model=toy.linear_float64, loss=toy.square_loss_float64, precision="bfloat16")
    with pytest.raises(UsageError, match="weight is float64; make the model with float32 parameters"):
        simulated(tmp_path / "doubles", doubles, mt.Sync())
    coded = toy.make_job(precision="float16", strategy=mt.AllReduce(codec=mt.TopK()))
    with pytest.raises(UsageError, match="a codec keeps what it does not send"):
        validate.check_precision(coded, torch.device("cuda"))
    assert apply_overrides(toy.make_job(), Overrides(precision="bfloat16")).loss.precision == "bfloat16"
