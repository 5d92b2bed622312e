"""Noise on gradients: its law, torch's steps with the same draws, the same bits in both worlds and after a resume."""

import functools

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.model.recipe import Noise, UpdateRule
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from tests import toy
from tests.threads.course import until_complete

NOISE = 0.05


def simulated(path, strategy, workers, **changes):
    return mt.simulate(toy.make_job(**changes), strategy, workers, run_dir=str(path), quiet=True)["model"]


def in_threads(path, text, **options):
    job = toy.make_job(gradient_noise=NOISE, checkpoint_every="24 samples")
    return mt.train(job, parse(text, "strategy"), threads=2, run_dir=str(path), quiet=True, **options)[
        "model"
    ]


def drawn(seed, key="0/0/0", dtype=torch.float32, scale=1.0):
    gradient = [torch.zeros(40_000, dtype=dtype) for _ in range(2)]
    Noise(0.5, seed).add(gradient, [key] * 2, scale)
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_is_zero_and_the_deviation_what_was_asked_for(dtype):
    for one in drawn(0, dtype=dtype):
        mean, deviation = one.double().mean(), one.double().std()
        assert (
            abs(mean) < 5 * 0.5 / 200 and abs(deviation - 0.5) < 5 * 0.5 / 200 / 2**0.5
        )  # five standard errors


def test_seeds_keys_and_tensors_draw_apart_and_the_same_ones_alike():
    draws = [one for seed, key in ((0, "0/0/0"), (1, "0/0/0"), (0, "6/0/0")) for one in drawn(seed, key)]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlations.abs().max() < 5 / 200
    assert torch.equal(drawn(0)[1], draws[1])
    assert torch.equal(drawn(0, scale=0.5)[0], draws[0] * 0.5)


def test_each_optimizer_of_a_step_and_each_holder_of_other_parameters_draws_for_itself():
    updates = UpdateRule(noise=Noise(0.5)).begin(None, list)
    found = []
    for samples, part in ((0, 0), (0, 1), (6, 0)):
        updates.follow(samples, 1, part)
        for _ in range(2):
            gradient = torch.zeros(1000)
            updates.shape(lambda gradient=gradient: [gradient])
            found.append(gradient)
    assert (torch.corrcoef(torch.stack(found)) - torch.eye(6)).abs().max() < 0.2
    gradient = torch.zeros(1000)
    updates.follow(0, 1, 7)
    updates.shape(lambda: [gradient], parts=lambda: [1])
    assert torch.equal(gradient, found[2])


@pytest.mark.parametrize("strategy", [mt.Sync(), mt.AllReduce(), mt.Backup(spare=0)], ids=str)
def test_the_mean_of_all_workers_is_torchs_with_the_same_draws_after_clipping(tmp_path, strategy):
    """Of ragged rounds, too."""
    changes = {"model": toy.smooth, "data": toy.Memory(52), "clip_norm": 0.3}
    by_hand = toy.noised_by_hand(toy.sgd, NOISE, toy.keys_of_steps(52, 2, 12))
    expected = toy.serial(toy.make_job(**changes, optimizer=by_hand, batch_size=12))
    found = load_file(simulated(tmp_path, strategy, 3, **changes, batch_size=4, gradient_noise=NOISE))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", [mt.Async(), mt.Sync(optimizer="worker"), mt.Decentralized()], ids=str)
def test_a_workers_own_gradient_is_torchs_with_the_same_draws(tmp_path, strategy):
    """Dropout draws from another stream."""
    by_hand = toy.noised_by_hand(toy.sgd, NOISE, [f"worker 0/{step}" for step in range(16)])
    expected = toy.serial(toy.make_job(optimizer=by_hand, clip_norm=0.3))
    found = load_file(simulated(tmp_path, strategy, 1, clip_norm=0.3, gradient_noise=NOISE))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


FAMILIES = ["allreduce()", "sync(servers=2)", "localsgd(period=2)", "decentralized()"]


@pytest.mark.parametrize("text", FAMILIES)
def test_threads_draw_what_virtual_time_draws_and_a_resume_goes_on_with_it(tmp_path, text):
    """To the bit."""
    expected = simulated(tmp_path / "virtual", parse(text, "strategy"), 2, gradient_noise=NOISE)
    begun = tmp_path / "begun"
    until_complete(functools.partial(in_threads, begun, text, epochs=1), begun)
    assert same_model(in_threads(tmp_path / "whole", text), expected)
    assert same_model(in_threads(tmp_path / "resumed", text, resume=str(begun)), expected)


def test_a_gradient_that_is_not_finite_is_skipped_as_without_noise(tmp_path):
    def poisoned(model, batch):
        return toy.square_loss(model, batch) * (float("nan") if (batch["x"][0] == first).all() else 1.0)

    first = toy.MemoryReader(toy.Memory()).x[6]
    for strategy in (mt.Sync(), mt.AllReduce(), mt.Async()):
        job = toy.make_job(loss=poisoned, on_nonfinite="skip", epochs=1, gradient_noise=NOISE)
        result = mt.simulate(job, strategy, 1, run_dir=str(tmp_path / strategy.name), quiet=True)
        assert (result["nonfinite"], result["status"]) == (1, "ok"), strategy


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1"])
def test_only_a_finite_number_of_at_least_zero_is_a_deviation(value):
    with pytest.raises(
        UsageError,
        match="Job: gradient_noise must be a finite number greater than 0, .* 0 or None for no noise",
    ):
        toy.make_job(gradient_noise=value)
    with pytest.raises(
        UsageError, match="--gradient-noise must be a finite number greater than 0, .* or 0 for no noise"
    ):
        Overrides(gradient_noise=value).check()


def test_the_command_line_replaces_the_jobs_noise_and_none_changes_no_bit(tmp_path):
    job = apply_overrides(toy.make_job(gradient_noise=1.0), Overrides(gradient_noise=0.0))
    assert job.gradient_noise == 0.0
    models = [
        mt.simulate(one, mt.Sync(), 2, run_dir=str(tmp_path / str(number)), quiet=True)["model"]
        for number, one in enumerate((job, toy.make_job(), toy.make_job(gradient_noise=1.0)))
    ]
    assert same_model(*models[:2]) and not same_model(*models[1:])
