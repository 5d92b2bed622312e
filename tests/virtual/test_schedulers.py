"""torch's schedulers, functions as schedules, and groups by name, in virtual time against torch's own loop."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.training.measure import build_optimizer
from mpitrain.values import parse
from tests import toy


def by_name(named_parameters):
    named = dict(named_parameters)
    weights = [one for name, one in named.items() if name.endswith("weight")]
    biases = [one for name, one in named.items() if name.endswith("bias")]
    return torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}], lr=0.05, momentum=0.9
    )


def shrinking(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trained(path, job, strategy="sync()", workers=1):
    mt.simulate(job, parse(strategy, "strategy"), workers=workers, run_dir=str(path), quiet=True)
    return load_file(path / "model.safetensors")


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("scheduler", toy.SCHEDULERS)
@pytest.mark.parametrize("optimizer", [toy.sgd, toy.two_groups, by_name])
@pytest.mark.parametrize(
    "strategy",
    ["sync()", "async(servers=2)", 'async(optimizer="worker")', "localsgd(period=1)", "decentralized()"],
)
def test_one_worker_follows_a_torch_scheduler_as_torchs_own_loop_does(
    strategy, optimizer, scheduler, tmp_path
):
    job = toy.make_job(optimizer=optimizer, scheduler=toy.SCHEDULERS[scheduler], data=toy.Memory(50))
    found, expected = trained(tmp_path / "a", job, strategy), toy.serial(job)
    if strategy in ('async(optimizer="worker")', "decentralized()"):  # which add differences
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    else:
        assert same(found, expected)
    assert not same(expected, toy.serial(toy.make_job(optimizer=optimizer, data=toy.Memory(50))))


@pytest.mark.parametrize(
    "strategy",
    ["sync()", "async(servers=2)", 'async(optimizer="worker")', "localsgd(period=1)", "decentralized()"],
)
def test_one_worker_steps_a_scheduler_after_every_epoch_as_torchs_own_loop_does(strategy, tmp_path):
    fields = {"data": toy.Memory(50), "epochs": 4, "model": toy.smooth}
    job = toy.make_job(scheduler=mt.PerEpoch(shrinking), **fields)
    found, expected = trained(tmp_path / "a", job, strategy), toy.serial(job)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert not same(expected, toy.serial(toy.make_job(scheduler=shrinking, **fields)))


@pytest.mark.parametrize("strategy", ["sync()", "sync(servers=2)", "localsgd(start=100)"])
@pytest.mark.parametrize("scheduler", toy.SCHEDULERS)
def test_workers_in_lockstep_step_it_as_one_process_with_their_whole_batch(strategy, scheduler, tmp_path):
    fields = {"model": toy.smooth, "scheduler": toy.SCHEDULERS[scheduler], "data": toy.Memory(52)}
    found = trained(tmp_path / "a", toy.make_job(batch_size=4, **fields), strategy, workers=3)
    for name, tensor in toy.serial(toy.make_job(batch_size=12, **fields)).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def lambda_by_samples(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0 / (1 + count))


def test_it_counts_full_batches_of_all_workers_whatever_the_updates_are():
    rates = Rates(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    schedule = TorchSchedule(lambda_by_samples, rates, Ticks(50, Law(4, 3)))
    assert [schedule.ticks.at(at) for at in (0, 4, 12, 48, 49, 50, 61, 62, 100)] == [
        0,
        0,
        1,
        4,
        4,
        5,
        5,
        6,
        10,
    ]
    assert [schedule.options_at(at)[0]["lr"] for at in (0, 12, 50, 12)] == [1, 1 / 2, 1 / 6, 1 / 2]
    left_out = Ticks(50, Law(4, 3, 12))
    assert [left_out.at(at) for at in (48, 60)] == [4, 5]


def test_epochs_are_counted_alike_by_any_number_of_workers_and_whatever_is_left_out():
    rates = Rates(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    for law, samples in ((Law(4, 3), 50), (Law(4, 3, 12), 48), (Law(50, 1), 50)):
        schedule = TorchSchedule(mt.PerEpoch(lambda_by_samples), rates, Ticks(50, law))
        places = [0, samples - 1, samples, 2 * samples - 1, 2 * samples, 0]
        assert [schedule.options_at(at)[0]["lr"] for at in places] == [1, 1, 1 / 2, 1 / 2, 1 / 3, 1]
        steps_in_epoch = -(-samples // law.step_samples)
        assert [schedule.num_ticks(7, steps) for steps in (None, steps_in_epoch, steps_in_epoch + 1)] == [
            7,
            1,
            2,
        ]


def torchs(name, **options):
    return lambda optimizer: getattr(torch.optim.lr_scheduler, name)(optimizer, **options)


@pytest.mark.parametrize(
    ("make", "num_ticks", "expected"),
    [
        (torchs("CosineAnnealingLR", T_max=8), 496, 8),
        (torchs("CosineAnnealingLR", T_max=496), 496, None),
        (torchs("CosineAnnealingWarmRestarts", T_0=100), 2000, None),
        (torchs("MultiStepLR", milestones=[3, 6]), 496, 6),
        (torchs("MultiStepLR", milestones=[100, 300]), 496, None),
        (torchs("StepLR", step_size=2, gamma=0.5), 496, 20),
        (torchs("StepLR", step_size=200, gamma=0.5), 496, None),
        (torchs("ExponentialLR", gamma=0.9), 496, None),  # comes to its end later than a tenth
        (torchs("ExponentialLR", gamma=0.9), 5000, 66),
        (torchs("LinearLR", start_factor=1e-4, total_iters=5), 496, None),  # a warm-up of five steps
        (torchs("OneCycleLR", max_lr=1.0, total_steps=8), 496, 7),
        (torchs("CosineAnnealingLR", T_max=8), 16, None),  # two steps an epoch
    ],
)
def test_a_scheduler_that_was_made_to_count_epochs_is_known_by_its_rates(make, num_ticks, expected):
    rates = Rates(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    schedule = TorchSchedule(make, rates, Ticks(num_ticks, Law(1, 1)))
    schedule.options_at(3)
    found = schedule.spent_at(num_ticks, 8)
    assert (found[0] if found else None) == expected
    assert schedule.options_at(2) == TorchSchedule(make, rates, Ticks(num_ticks, Law(1, 1))).options_at(2)


def ended(part, milestone=None):
    rates = Rates(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))

    def make(optimizer):
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        if milestone is None:
            return cycle
        other = lambda_by_samples(optimizer)
        parts = [cycle, other] if part == 0 else [other, cycle]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [milestone])

    return TorchSchedule(make, rates, Ticks(100, Law(1, 1)))


@pytest.mark.parametrize(
    ("schedule", "last"),
    [(ended(0), 9), (ended(1, 5), 14), (ended(0, 11), None), (ended(0, 12), 9)],
    ids=["alone", "last", "followed", "too short"],
)
def test_behind_the_last_step_of_a_scheduler_its_rate_stays(schedule, last):
    """torch raises there, where it is stepped once more."""
    found = [schedule.options_at(at)[0]["lr"] for at in range(30)]
    assert schedule.last_tick == last
    if last is not None:
        assert set(found[last:]) == {found[last]} and found[last] < found[last - 1]


@pytest.mark.parametrize("strategy", ["sync()", 'sync(optimizer="worker")'])
def test_a_tick_is_a_step_of_those_that_are_left_when_a_worker_has_died(strategy, tmp_path):
    rates = []

    class Seen(torch.optim.SGD):
        elementwise = True

        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    job = toy.make_job(
        optimizer=lambda parameters: Seen(parameters, lr=1.0), scheduler=shrinking, data=toy.Memory(96), epochs=2,
        batch_size=4,
    )  # fmt: skip
    mt.simulate(
        job, parse(strategy, "strategy"), workers=3, run_dir=str(tmp_path), quiet=True,
        inject=["kill(worker=2, at_step=4)"],
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if row["event"] == "schedule"]
    assert [row["tick"] for row in told] == ["12 -> 8 samples"] and told[0]["ticks"] in (4, 5)
    counts = sorted({round(math.log(rate) / math.log(0.9)) for rate in rates})
    # 4 or 5 ticks of 12 samples, the others of 8
    assert counts == list(range(len(counts))) and 20 <= counts[-1] <= 23, counts


def of_pairs(parameters):
    return torch.optim.SGD([one for name, one in parameters if "bias" not in name], lr=0.1)


def of_a_dict(parameters):
    return torch.optim.SGD(dict(parameters).values(), lr=0.1)


def of_the_function(parameters):
    return torch.optim.SGD([one for name, one in toy.smooth.named_parameters()], lr=0.1)


@pytest.mark.parametrize("make", [of_pairs, of_a_dict, of_the_function])
def test_an_optimizer_that_wants_names_is_told_how_it_gets_them(make):
    with pytest.raises(
        UsageError, match=r"test_schedulers.py, line \d+\).*def optimizer\(named_parameters\)"
    ):
        build_optimizer(toy.make_job(model=toy.smooth, optimizer=make), toy.smooth(), None)
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        build_optimizer(toy.make_job(optimizer=lambda p: torch.optim.SGD(p, lr=-1)), toy.smooth(), None)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    "strategy", ["sync()", "async()", "localsgd(period=2)", "decentralized()", "elastic(push_every=2)"]
)
def test_a_function_of_epochs_and_workers_is_a_schedule(strategy, tmp_path):
    value = toy.make_job(schedule=mt.Decay(every=1, by=0.1))
    function = toy.make_job(schedule=lambda epochs, workers: 0.1 ** int(epochs) * (workers == 2))
    found = [trained(tmp_path / name, job, strategy, 2) for name, job in (("a", value), ("b", function))]
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheduler": plateau}, "goes by what validations measure"),
        ({"scheduler": mt.PerEpoch(plateau), "validate": toy.Memory(20)}, "leave mpitrain.PerEpoch out"),
        ({"scheduler": lambda optimizer: None}, "it returned None"),
        ({"scheduler": 3}, "scheduler must be a function"),
        ({"schedule": 3}, "schedule must be a value.*or a function"),
        ({"schedule": lambda epochs: 1.0}, r"called with \(epochs, workers\)"),
        ({"schedule": mt.Cosine(2), "scheduler": lambda_by_samples}, "give one of them"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_schedule_is_refused(changes, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        trained(tmp_path / "a", toy.make_job(**changes))
