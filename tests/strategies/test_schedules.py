"""Schedules: continuous where they should be, and the same for every strategy because they count samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.model.recipe import seed_step
from mpitrain.values import parse, registered
from tests import toy


@given(st.floats(0, 200), st.integers(1, 512))
def test_the_ramp_is_affine_and_continuous_at_its_end(epochs, num_workers):
    ramp = mt.Gradual(epochs=5.0)
    assert ramp.factor(0, num_workers) == 1
    expected = 1 + (num_workers - 1) * min(epochs, 5) / 5
    assert ramp.factor(epochs, num_workers) == pytest.approx(expected)
    assert ramp.factor(5, num_workers) == pytest.approx(ramp.factor(5 - 1e-9, num_workers))
    assert mt.Gradual(5, "sqrt").factor(99, num_workers) == pytest.approx(num_workers**0.5)


def test_steps_and_cosine():
    assert [mt.Decay(10, 0.5).factor(epochs, 3) for epochs in (0, 9.99, 10, 25)] == [1, 1, 0.5, 0.25]
    cosine = mt.Cosine(10, floor=0.1)
    assert [round(cosine.factor(epochs, 3), 6) for epochs in (0, 5, 10, 99)] == [1, 0.55, 0.1, 0.1]
    both = mt.Gradual(2, then=mt.Decay(4, 0.5))
    assert both.factor(1, 3) == 2 and both.factor(4, 3) == 1.5


def test_every_schedule_round_trips():
    for cls in registered("schedule"):
        assert parse(str(cls()), "schedule") == cls()


def serial_with(job, factor):
    """Serial training with the rate set by hand before each step."""
    torch.manual_seed(job.seed)
    module, reader, step = job.model(), job.data.reader(None, 0), 0
    optimizer = job.optimizer(module.parameters())
    base = optimizer.param_groups[0]["lr"]
    for epoch in range(job.epochs):
        for start in range(0, 48, 6):
            seed_step(0, 0, step)
            optimizer.zero_grad(set_to_none=True)
            job.loss(module, reader.batch(epoch, start, 6)).backward()
            optimizer.param_groups[0]["lr"] = base * factor(step * 6 / 48)
            optimizer.step()
            step += 1
    return module.state_dict()


def test_one_asynchronous_worker_follows_the_schedule_bit_for_bit(tmp_path):
    schedule = mt.Gradual(1, "none", then=mt.Cosine(2))
    result = mt.simulate(
        toy.make_job(schedule=schedule), mt.Async(), workers=1, run_dir=str(tmp_path / "a"), quiet=True
    )
    expected = serial_with(toy.make_job(), lambda epochs: schedule.factor(epochs, 1))
    trained = load_file(result["model"])
    assert all(torch.equal(trained[name], tensor) for name, tensor in expected.items())
    plain = mt.simulate(toy.make_job(), mt.Async(), workers=1, run_dir=str(tmp_path / "b"), quiet=True)
    assert not torch.equal(load_file(plain["model"])["0.weight"], trained["0.weight"])


def test_linear_scaling_on_four_workers_is_four_times_the_rate(tmp_path):
    scaled = mt.simulate(
        toy.make_job(schedule=mt.Gradual(0)), mt.Sync(), workers=4, run_dir=str(tmp_path / "a"), quiet=True
    )
    by_hand = mt.simulate(
        toy.make_job(), mt.Sync(), workers=4, run_dir=str(tmp_path / "b"), quiet=True, lr=0.05 * 4
    )
    first, second = load_file(scaled["model"]), load_file(by_hand["model"])
    assert all(torch.equal(first[name], second[name]) for name in first)
