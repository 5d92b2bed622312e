"""The best model, and the end after validations without a better one, in virtual time and by arithmetic."""

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.reporting.targets import read_choice
from mpitrain.strategies.validation_policy import (
    ValidationCadence,
    ValidationPolicy,
    read_validation_policy,
)
from mpitrain.training.measure import save_tensors
from mpitrain.training.validations.best_model import Validations, begin_from
from mpitrain.values import parse
from tests import toy

FAMILIES = [
    "sync()", "sync(servers=2)", "async()", "async(push_every=2)", "elastic(push_every=2)", "localsgd(period=2)",
    "decentralized()", "decentralized(asynchronous=True, resync=2)", "decentralized(topology='ring')",
    "allreduce()", "sharded(replicas=2)",
]  # fmt: skip


def grows(model, batch):
    """The first is the best, whatever the training does."""
    grows.calls += 1
    return {"distance": float(grows.calls), "score": -float(grows.calls)}


def run(path, strategy="sync()", **changes):
    grows.calls = 0
    job = toy.make_job(**{"validate": toy.Memory(), "metrics": grows, "epochs": 4} | changes)
    result = mt.simulate(job, parse(strategy, "strategy"), workers=2, run_dir=str(path), quiet=True)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return result, [row for row in rows if row["event"] == "validation"], job


@pytest.mark.parametrize("strategy", FAMILIES)
def test_the_best_model_is_the_one_that_was_measured_best_and_the_last_one_stays(strategy, tmp_path):
    result, rows, job = run(tmp_path / "a", strategy, keep_best="score")
    assert result["best"]["value"] == -1.0 and result["best"]["samples"] == rows[0]["samples"]
    assert result["best"]["validations_since"] == len(rows) == 3  # and the final model
    batch = vars(toy.MemoryReader(toy.Memory()))
    modules = {which: mt.load(tmp_path / "a", job, which=which) for which in ("best", "last")}
    loss = {which: toy.square_loss(module, batch).item() for which, module in modules.items()}
    assert loss["best"] == pytest.approx(rows[0]["validation_loss"], rel=1e-5)
    assert loss["last"] == pytest.approx(result["validation_loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", FAMILIES)
def test_patience_ends_the_run_in_order_under_every_family(strategy, tmp_path):
    result, rows, _ = run(tmp_path / "a", strategy, keep_best="<distance", patience=1)
    assert result["status"] == "ok" and result["exit_code"] == 0 and result["ended_early"]
    assert len(rows) == 2 and result["samples"] < 4 * 48
    assert result["best"]["validations_since"] == 1
    if strategy.startswith(("localsgd", "allreduce")):  # and no step is counted that was not taken
        assert result["steps"] == result["samples"] // 12


def test_without_a_metric_patience_goes_by_the_validation_loss_and_a_run_that_improves_goes_on(tmp_path):
    result, rows, _ = run(tmp_path / "a", patience=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    assert not result["ended_early"] and result["samples"] == 4 * 48
    assert result["best"]["metric"] == "validation_loss" and result["best"]["model"] is None
    assert not (tmp_path / "a" / "model-best.safetensors").exists()


@pytest.mark.parametrize("strategy", ["sync()", "localsgd(period=2)", "decentralized()"])
def test_validations_by_samples_and_by_several_epochs(strategy, tmp_path):
    _, rows, _ = run(tmp_path / "a", strategy, validate_every="24 samples", epochs=2)
    assert [row["samples"] for row in rows] == [24, 48, 72]
    _, rows, _ = run(tmp_path / "b", strategy, validate_every=2)
    assert [row["samples"] for row in rows] == [96]
    _, rows, _ = run(tmp_path / "c", strategy, validate_every="never")
    assert rows == []


def test_a_run_that_validates_more_often_trains_the_same_model(tmp_path):
    for name, every in (("a", None), ("b", "12 samples")):
        run(tmp_path / name, validate_every=every, metrics=None, keep_best="validation_loss")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("when", "policy"),
    [
        (None, ValidationPolicy(epochs=1)), (3, ValidationPolicy(epochs=3)), ("2 epochs", ValidationPolicy(epochs=2)),
        ("1 epoch", ValidationPolicy(epochs=1)), ("10000 samples", ValidationPolicy(samples=10000)),
        ("60s", ValidationPolicy(seconds=60)), ("0.5 s", ValidationPolicy(seconds=0.5)), ("never", ValidationPolicy()),
        ("100", ValidationPolicy(epochs=100)),
    ],
)  # fmt: skip
def test_when_to_validate_is_read(when, policy):
    assert read_validation_policy(when) == policy


@pytest.mark.parametrize("when", [0, -1, True, "0", "0 samples", "often", 1.5, ""])
def test_what_has_no_unit_or_no_meaning_is_refused(when):
    with pytest.raises(UsageError, match="validate_every"):
        read_validation_policy(when)


def test_a_cadence_counts_from_where_it_begins_and_never_twice():
    cadence = ValidationCadence(ValidationPolicy(samples=100))
    assert [cadence.is_due(0, at) for at in (150, 180, 200, 210, 450, 460)] == [0, 0, 1, 0, 1, 0]
    cadence = ValidationCadence(ValidationPolicy(epochs=2))
    assert [cadence.is_due(at, 0) for at in (1, 2, 1, 2, 3, 4)] == [0, 1, 0, 0, 0, 1]
    clock = iter((10, 14, 15, 15, 19, 21, 21))
    cadence = ValidationCadence(ValidationPolicy(seconds=5), clock=lambda: next(clock))
    assert [cadence.is_due(0, 0) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_the_direction_is_known_or_said():
    assert read_choice("accuracy").is_better(0.9, 0.8) and not read_choice("accuracy").is_better(0.8, 0.8)
    for name in ("loss", "validation_loss", "my_error", "perplexity", "<distance"):
        assert read_choice(name).is_better(0.8, 0.9), name
    assert read_choice(">loss").is_better(0.9, 0.8)
    assert not any(read_choice("a").is_better(value, None) for value in (math.nan, math.inf, None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_best": "accuracy"}, "keep_best 'accuracy': validation reports no metric of that name"),
        ({"keep_best": "accuracy", "metrics": toy.nothing}, "'accuracy'.*it reports nothing, validation_loss"),
        ({"keep_best": "validation_loss", "validate": None}, "needs validate= data"),
        ({"patience": 2, "validate": None}, "needs validate= data"), ({"patience": 0}, "whole number of at least 1"),
        ({"keep_best": "a<b"}, "write a metric"), ({"validate_every": "5s"}, "counts seconds of a clock"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        job = toy.make_job(**{"validate": toy.Memory()} | changes)
        mt.simulate(job, mt.Sync(), workers=2, run_dir=str(tmp_path), quiet=True)


def test_a_run_without_a_best_model_says_what_keeps_one(tmp_path):
    _, _, job = run(tmp_path / "a")
    with pytest.raises(UsageError, match="has kept no best model: a job with keep_best"):
        mt.load(tmp_path / "a", job, which="best")
    with pytest.raises(UsageError, match="which='bset'; did you mean 'best'"):
        mt.load(tmp_path / "a", job, which="bset")


def take(validations, *pairs):
    for samples, value in pairs:
        tensors = {"x": torch.tensor([value])}
        validations.take_metrics({"score": value}, samples, functools.partial(save_tensors, tensors))


def test_a_run_that_goes_on_judges_as_if_it_had_never_stopped(tmp_path):
    job = toy.make_job(validate=toy.Memory(), metrics=grows, keep_best="score", patience=3)
    (tmp_path / "a").mkdir()
    first = Validations(job, tmp_path / "a")
    take(first, (10, 1.0), (20, 0.5), (30, 2.0), (40, 1.5), (50, 1.0))
    assert not first.over and first.record["since"] == [40, 50]
    begin_from(tmp_path / "a", tmp_path / "a", 25)  # a checkpoint before the best one
    again = Validations(job, tmp_path / "a")
    take(again, (30, 2.0), (40, 1.5), (50, 1.0))
    assert again.record == first.record and not again.over
    take(again, (60, 0.0))
    assert again.over and Validations(job, tmp_path / "a").over
    assert load_file(tmp_path / "a" / "model-best.safetensors")["x"].item() == 2.0


def test_another_directory_takes_the_best_along_unless_it_lies_beyond(tmp_path):
    job = toy.make_job(validate=toy.Memory(), metrics=grows, keep_best="score", patience=3)
    for name in "abc":
        (tmp_path / name).mkdir()
    take(Validations(job, tmp_path / "a"), (10, 1.0), (20, 0.5), (30, 0.5))
    begin_from(tmp_path / "b", tmp_path / "a", 25)
    assert Validations(job, tmp_path / "b").record["since"] == [20]
    assert (tmp_path / "b" / "model-best.safetensors").is_file()
    begin_from(tmp_path / "c", tmp_path / "a", 5)
    assert Validations(job, tmp_path / "c").record["value"] is None
    other = toy.make_job(validate=toy.Memory(), metrics=grows, keep_best="distance")
    assert Validations(other, tmp_path / "a").record["value"] is None  # another metric
