"""Schedulers that go by what validations measure, in virtual time against torch's own loop."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.strategies.figures import Figures
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.values import parse
from tests import toy

VALIDATION = toy.Memory(20)


def at_once(optimizer):
    """Halves the rate after every validation that has not brought a loss that is lower by a tenth."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)


def rising(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)


def whole_loss(module):
    reader = VALIDATION.reader(None, 0)
    module.eval()
    with torch.no_grad():
        [batch] = reader.sequential(256)
        loss = toy.square_loss(module, batch)
    module.train()
    return float(loss)


def serial(job):
    """torch's own loop, with a validation and a step of the scheduler after each epoch; returns the rates, too."""
    made, rates = {}, []

    def keep(optimizer):
        made["scheduler"] = job.scheduler(optimizer)
        made["optimizer"] = optimizer

    per_epoch = -(-job.data.num_samples // job.batch_size)
    count = iter(range(10**6))

    def on_step(module):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        if next(count) % per_epoch == per_epoch - 1:
            made["scheduler"].step(whole_loss(module))

    state = toy.serial(dataclasses.replace(job, scheduler=keep, validate=None), on_step=on_step)
    return state, rates


def make_job(**changes):
    fields = {"model": toy.smooth, "data": toy.Memory(50), "validate": VALIDATION, "epochs": 5} | changes
    return toy.make_job(**fields)


@pytest.mark.parametrize("scheduler", [at_once, pytest.param(rising, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce()", "sync()", "async(servers=2)", 'async(optimizer="worker")', "localsgd(period=1)",
        "decentralized()", "decentralized(asynchronous=True, resync=2)",
    ],
)  # fmt: skip
def test_one_worker_steps_it_after_every_validation_as_torchs_own_loop_does(strategy, scheduler, tmp_path):
    job = make_job(scheduler=scheduler)
    mt.simulate(job, parse(strategy, "strategy"), workers=1, run_dir=str(tmp_path), quiet=True)
    expected, rates = serial(job)
    assert len(set(rates)) > 1
    for name, found in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", ["allreduce()", "sync(servers=2)", "localsgd(start=100)", "sharded()"],
)  # fmt: skip
def test_workers_in_lockstep_follow_it_as_one_process_with_their_whole_batch(strategy, tmp_path):
    job = make_job(scheduler=at_once, batch_size=4, data=toy.Memory(48))
    mt.simulate(job, parse(strategy, "strategy"), workers=3, run_dir=str(tmp_path), quiet=True)
    expected, _ = serial(dataclasses.replace(job, batch_size=12))
    for name, found in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


def scripted(values):
    """A metric of the job's own that gives these one after the other."""
    left = iter(values)
    return lambda model, batch: {"score": next(left)}


def test_it_goes_by_the_metric_that_the_job_names_as_the_scheduler_judges_it(tmp_path):
    rates = []

    class Seen(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def best_score(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)

    job = make_job(
        data=toy.Memory(6), optimizer=lambda parameters: Seen(parameters, lr=1.0), scheduler=best_score,
        scheduler_metric="score", metrics=scripted([1.0, 2.0, 2.0, 3.0, float("nan"), 4.0]), epochs=6,
    )  # fmt: skip
    mt.simulate(job, workers=1, run_dir=str(tmp_path), quiet=True)
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_validation_that_is_made_again_takes_the_place_of_those_from_there_on():
    rates = Rates(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    schedule = TorchSchedule(rising, rates, Ticks(10, Law(1, 1)), "validation_loss")

    def rate(*rows):
        schedule.figures.take_rows(rows)
        return schedule.options_at(0)[0]["lr"]

    assert [rate((1, 10, 1.0)), rate((2, 20, 0.5)), rate((3, 30, 0.1))] == [1.0, 0.5, 0.25]
    assert rate((3, 30, 0.1)) == 0.25  # told twice
    assert rate((2, 20, 2.0)) == 1.0  # a run that has gone back
    other = Figures()
    other.take_told(schedule.figures.told())
    assert other.rows == schedule.figures.rows == [(1, 10, 1.0), (2, 20, 2.0)]
    assert Figures().told() == schedule.figures.told(20) == ""


@pytest.mark.parametrize(
    ("changes", "strategy", "said"),
    [
        ({"validate": None}, "sync()", "ReduceLROnPlateau goes by what validations measure.*give validate="),
        ({"validate_every": "never"}, "allreduce()", 'makes none before its end.*other than "never"'),
        ({"scheduler_metric": "accuracy"}, "sync()", "scheduler_metric 'accuracy': validation reports no metric"),
        ({"scheduler_metric": "<validation_loss"}, "sync()", "name the metric alone.*mode="),
        ({"scheduler": None, "scheduler_metric": "validation_loss"}, "sync()", "give scheduler, too"),
        (
            {"scheduler": toy.SCHEDULERS["steps"], "scheduler_metric": "validation_loss"},
            "sync()",
            "goes by no metric",
        ),
        ({}, "decentralized(asynchronous=True)", "never wait for one another.*resync=R"),
        ({"metrics": lambda model, batch: {"one": 1.0}, "scheduler_metric": "two"}, "localsgd()", "reports one, val"),
    ],
)  # fmt: skip
def test_a_metric_that_nobody_measures_is_refused(changes, strategy, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        job = make_job(**{"scheduler": at_once, **changes})
        mt.simulate(job, parse(strategy, "strategy"), workers=2, run_dir=str(tmp_path), quiet=True)
