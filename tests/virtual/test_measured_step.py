"""A simulation on the times that its batches take here."""

from __future__ import annotations

import time

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.simulation.measured_step import charged, measure_step
from mpitrain.training.validations.validation import LEAST_BATCH, Measure
from mpitrain.values import parse
from mpitrain.virtual import Costs
from mpitrain.virtual.compute import WorkerTimes
from tests import toy

SLOW_S = 0.02


@pytest.mark.parametrize("strategy", [mt.Async(), mt.AllReduce()], ids=str)
def test_the_job_s_batches_are_timed_and_reported(tmp_path, strategy):
    result = mt.simulate(
        toy.make_job(validate=toy.Memory(16)),
        strategy,
        2,
        parse("measured(0.05)", "compute"),
        steps=4,
        run_dir=str(tmp_path),
        quiet=True,
    )
    found = result["measured"]
    assert result["compute"] == "measured(for_s=0.05)" and found["batches"] >= 3
    assert found["gradient_s"] == pytest.approx(found["forward_s"] + found["backward_s"])
    assert all(found[key] > 0 for key in ("forward_s", "backward_s", "read_s", "optimizer_s"))
    assert found["bucket_ends_s"][-1] > 0 and found["bucket_ends_s"] == sorted(found["bucket_ends_s"])
    assert found["encode_s"] == 0.0
    assert found["validate_s"] > 0
    assert 4 * found["gradient_s"] / 10 < result["virtual_s"]


def test_a_codec_is_timed_and_parameters_are_those_of_any_other_law(tmp_path):
    def run(name, law):
        result = mt.simulate(
            toy.make_job(), parse("sync(push_wire=topk())", "strategy"), 2, parse(law, "compute"), steps=3,
            run_dir=str(tmp_path / name), quiet=True,
        )  # fmt: skip
        return result, (tmp_path / name / "model.safetensors").read_bytes()

    (measured, one), (_, other) = run("measured", "measured(0.01)"), run("plain", "constant(1)")
    found = measured["measured"]
    assert found["encode_s"] > 0 and found["decode_s"] > 0 and one == other
    assert f"decode_gb_per_s={found['trained_bytes'] / found['decode_s'] / 1e9}" in measured["costs"]


def test_measured_times_may_stand_in_another_law(tmp_path):
    """Workers of which one keeps taking fifty times as long."""
    law = "persistent(bernoulli(measured(0.05), chance=0.0), factors=[1, 50])"
    result = mt.simulate(
        toy.make_job(validate=None),
        mt.Async(),
        2,
        parse(law, "compute"),
        steps=20,
        run_dir=str(tmp_path),
        quiet=True,
    )
    fast, slow = (row["compute_s"] / row["steps"] for row in result["per_worker"])
    assert slow > 5 * fast > 0 and result["measured"]["batches"] >= 3


def test_the_law_knows_what_of_a_batch_is_forward_and_when_gradients_come():
    """The loss sleeps before it computes."""

    def loss(model, batch):
        time.sleep(SLOW_S)
        return toy.square_loss(model, batch)

    job = toy.make_job(loss=loss)
    law, found = measure_step(job, None, job.data.scan(), 0.2)
    assert law.course.forward_share == pytest.approx(found["forward_s"] / found["gradient_s"])
    assert found["forward_s"] >= SLOW_S  # however long a busy machine takes for the rest
    assert law.course.ready == tuple(
        min(1.0, end_s / found["backward_s"]) for end_s in found["bucket_ends_s"]
    )
    assert 0 < law.course.ready[-1] <= 1


def test_outside_a_simulation_there_is_nothing_to_measure():
    with pytest.raises(UsageError, match="simulation"):
        WorkerTimes(parse("measured()", "compute"), 0, 0)


class SlowSGD(torch.optim.SGD):
    elementwise = True

    def step(self, closure=None):
        time.sleep(SLOW_S)
        return super().step(closure)


@pytest.mark.parametrize(
    ("strategy", "updates"),
    [
        (mt.Async(), 8),
        (mt.Async(optimizer="worker"), 4),
        (mt.AllReduce(), 4),
        (mt.LocalSGD(period=2), 4),
        (mt.Decentralized(), 4),
    ],
    ids=str,
)
def test_updates_are_charged_as_measured_unless_their_costs_are_given(tmp_path, strategy, updates):
    """A server updates once for each push; other ranks update at once, once a step."""
    took_s = {}
    for name, costs in (("measured", mt.virtual.Costs()), ("given", mt.virtual.Costs(memory_gb_per_s=1e3))):
        run_dir = tmp_path / name
        result = mt.simulate(
            toy.make_job(optimizer=lambda parameters: SlowSGD(parameters, 0.01)), strategy, 2,
            parse("measured(0.1)", "compute"), costs=costs, steps=4, run_dir=str(run_dir), quiet=True,
        )  # fmt: skip
        took_s[name] = result["virtual_s"]
        assert result["measured"]["optimizer_s"] >= SLOW_S
        assert ("memory_gb_per_s=1000" in result["costs"]) == (name == "given")
    assert took_s["measured"] >= updates * SLOW_S


def test_a_validation_s_time_is_charged_where_costs_say_nothing_of_it(monkeypatch):
    """Of a set of 40 batches no more are measured than fit into the time, which is none here, and one at least."""
    seen = []
    part = Measure.part
    monkeypatch.setattr(Measure, "part", lambda self, *bounds: seen.append(bounds) or part(self, *bounds))
    job = toy.make_job(validate=toy.Memory(40 * LEAST_BATCH))
    _, found = measure_step(job, None, job.data.scan(), 1e-6)
    assert seen == [(0, 1), (0, 1)]  # to warm up, and measured
    assert charged(Costs(), found).validate_s == found["validate_s"] > 0
    assert charged(Costs(validate_s=7.0), found).validate_s == 7.0
    assert measure_step(toy.make_job(validate=None), None, job.data.scan(), 1e-6)[1]["validate_s"] == 0.0
