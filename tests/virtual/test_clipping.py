"""Clipping in virtual time: torch's own on the mean gradient in lockstep, on each worker's own gradient elsewhere, and
before any codec.
"""

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.model.gradient.clipping import Clipping
from mpitrain.model.recipe import GradientRule
from mpitrain.model.wire.push_codec import PushCoder
from mpitrain.strategies import Backup, Sync
from mpitrain.virtual import Exponential
from tests import toy

LIMITS = {
    "norm": {"clip_norm": 0.3},
    "value": {"clip_value": 0.125},
    "both": {"clip_norm": 0.3, "clip_value": 0.125},
}


def trained(path, job, strategy, workers):
    options = {"run_dir": str(path), "quiet": True, "compute": Exponential()}
    return load_file(mt.simulate(job, strategy, workers, **options)["model"])


def equal(found, expected):
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_lockstep_is_torchs_clipping_of_the_whole_batch_bit_for_bit(tmp_path, num_workers, kind, limits):
    """Where sums do not depend on their order; a quotient by a norm is on no dyadic grid, nor are gradients after it,
    unless they do not depend on the parameters."""
    exact = limits == "value" or kind == "linear in float32"
    changes = toy.DYADIC[kind] | {"epochs": 1} | LIMITS[limits]
    expected = toy.serial(toy.make_job(**changes, batch_size=16))
    assert not equal(toy.serial(toy.make_job(**toy.DYADIC[kind], epochs=1, batch_size=16)), expected)
    job = toy.make_job(**changes, batch_size=16 // num_workers)
    for number in (1, 2, 3):
        for rule in (Sync(servers=number), Backup(spare=0, servers=number)):
            found = trained(tmp_path / str(rule), job, rule, num_workers)
            assert equal(found, expected) or not exact, rule
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam, toy.two_groups])
@pytest.mark.parametrize("limits", LIMITS)
def test_lockstep_clips_the_mean_over_samples_of_a_ragged_round(tmp_path, limits, optimizer):
    """Also where batches differ in size and weigh by their samples."""
    changes = {"model": toy.smooth, "data": toy.Memory(52), "optimizer": optimizer} | LIMITS[limits]
    expected = toy.serial(toy.make_job(**changes, batch_size=12))
    job = toy.make_job(**changes, batch_size=4)
    found = trained(tmp_path / "plain", job, Sync(), 3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


ALONE = [
    mt.Sync(), mt.Async(), mt.Async(servers=3), mt.SoftSync(updates=1), mt.StaleSync(bound=1), mt.Bounded(staleness=1),
    mt.Sync(optimizer="worker"), mt.LocalSGD(period=1), mt.Decentralized(),
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("strategy", ALONE, ids=str)
def test_one_worker_is_the_serial_loop_with_torchs_clipping(tmp_path, strategy, limits):
    """Dropout, momentum, weight decay, a ragged end."""
    job = toy.make_job(data=toy.Memory(50), **LIMITS[limits])
    expected, found = toy.serial(job), trained(tmp_path / "run", job, strategy, 1)
    if strategy in (mt.Sync(optimizer="worker"), mt.Decentralized()):  # these add a difference, which rounds
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    else:
        assert equal(found, expected)


@pytest.mark.parametrize(
    "strategy", [*ALONE, mt.Sync(push_wire=mt.TopK()), mt.Elastic(), mt.Async(push_every=2)], ids=str
)
def test_limits_that_nothing_exceeds_change_no_bit(tmp_path, strategy):
    huge = {"clip_norm": 1e30, "clip_value": 1e30}
    found, expected = (
        trained(tmp_path / str(len(fields)), toy.make_job(**fields), strategy, 3) for fields in (huge, {})
    )
    assert equal(found, expected)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rule", [mt.Async, mt.Sync])
def test_a_codec_is_given_clipped_gradients(tmp_path, monkeypatch, rule, servers):
    seen = []
    encode = PushCoder.encode

    def spied(self, wire_buffers, finite):
        seen.append(float(torch.cat([one.body for one in wire_buffers]).norm()))
        return encode(self, wire_buffers, finite)

    monkeypatch.setattr(PushCoder, "encode", spied)
    strategy = rule(servers=servers, push_wire=mt.TopK(density=0.1))
    trained(tmp_path / "free", toy.make_job(), strategy, 2)
    longest, _ = max(seen), seen.clear()
    trained(tmp_path / "clipped", toy.make_job(clip_norm=0.05), strategy, 2)
    assert longest > 0.5 and max(seen) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Async(), mt.LocalSGD(period=2), mt.Decentralized()], ids=str
)
@pytest.mark.parametrize("limits", LIMITS)
def test_a_gradient_that_is_not_finite_is_refused_and_not_made_finite(tmp_path, strategy, limits):
    """An infinite number clipped by value would be a finite one."""

    def poisoned(model, batch):
        return toy.square_loss(model, batch) * (float("inf") if (batch["x"][0] == first).all() else 1.0)

    first = toy.MemoryReader(toy.Memory()).x[6]
    job = toy.make_job(loss=poisoned, on_nonfinite="skip", epochs=1, **LIMITS[limits])
    result = mt.simulate(job, strategy, 1, run_dir=str(tmp_path), quiet=True)
    assert result["nonfinite"] == 1 and result["status"] == "ok"


def test_an_infinite_gradient_below_a_finite_loss_is_left_as_it_is():
    gradient = torch.tensor([1.0, float("inf"), 3.0])
    GradientRule(clipping=Clipping(norm=0.5, value=0.5)).begin(0).shape([gradient])
    assert gradient.tolist() == [1.0, float("inf"), 3.0]


@pytest.mark.parametrize("key", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_only_a_finite_number_above_zero_is_a_limit(key, value):
    with pytest.raises(UsageError, match=f"Job: {key} must be a finite number greater than 0, .* or None"):
        toy.make_job(**{key: value})
    with pytest.raises(UsageError, match=f"--{key.replace('_', '-')} must be a finite number greater than 0"):
        Overrides(**{key: value}).check()


def test_the_command_line_replaces_the_jobs_limits():
    job = apply_overrides(toy.make_job(clip_norm=1.0, clip_value=3.0), Overrides(clip_norm=2.0))
    assert (job.clip_norm, job.clip_value) == (2.0, 3.0)
