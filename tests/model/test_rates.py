"""What an optimizer goes on with: its state, what training made of its options, and what its owner changed since."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from mpitrain.checkpoint.state_tree import join, split
from mpitrain.model.optimizers.optimizer import Rates, attached_schedulers, set_learning_rate

START = [torch.linspace(-1, 1, 6), torch.linspace(1, 2, 4)]


class Run:
    """Two parameters, an optimizer on them, and steps on gradients that the step's number gives."""

    def __init__(self, make, schedule=None):
        self.parameters = [nn.Parameter(start.clone()) for start in START]
        self.optimizer = make(self.parameters)
        self.rates, self.schedule, self.step = Rates(self.optimizer), schedule, 0

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step += 1
            if self.schedule:
                self.rates.set(self.schedule(self.step))
            for number, parameter in enumerate(self.parameters):
                parameter.grad = torch.cos(parameter.detach() * (self.step + number))
            self.optimizer.step()
        return self

    def resumed(self, make, schedule=None):
        """Another process: what was written, read back, under a job that makes its optimizer by `make`."""
        other = Run(make, schedule)
        other.step = self.step
        other.rates.restore(join(*split(copy.deepcopy(self.rates.state()))))
        for mine, theirs in zip(other.parameters, self.parameters, strict=True):
            mine.data.copy_(theirs.data)
        return other

    def values(self):
        return torch.cat([parameter.detach() for parameter in self.parameters])


def sgd(lr=0.1, **options):
    return lambda parameters: SGD(parameters, lr=lr, **({"momentum": 0.9, "weight_decay": 0.01} | options))


def two_groups(first=0.1, second=0.02, **options):
    return lambda p: AdamW(
        [{"params": p[:1], "lr": first}, {"params": p[1:], "lr": second, "weight_decay": 0.5}], **options
    )


def scheduled(make, scheduler, **settings):
    """As a job attaches one of torch's schedulers: stepped after every step."""

    def made(parameters):
        optimizer = make(parameters)
        attached = scheduler(optimizer, **settings)
        optimizer.register_step_post_hook(lambda *_: attached.step())
        return optimizer

    return made


SCHEDULERS = {
    "step": scheduled(sgd(), StepLR, step_size=3, gamma=0.5),
    "lambda": scheduled(sgd(), LambdaLR, lr_lambda=lambda n: min(1.0, n / 5)),
    "cosine": scheduled(two_groups(), CosineAnnealingLR, T_max=9),
}


@pytest.mark.parametrize(
    "make", [sgd(), two_groups(), lambda p: Adam(p, lr=torch.tensor(0.1)), *SCHEDULERS.values()]
)
@pytest.mark.parametrize("schedule", [None, lambda step: 0.5 ** (step // 3)])
def test_unchanged_options_go_on_bit_for_bit(make, schedule):
    whole = Run(make, schedule).train(9)
    half = Run(make, schedule).train(4)
    again = half.resumed(make, schedule).train(1).resumed(make, schedule).train(4)  # and resumed once more
    assert torch.equal(again.values(), whole.values())


@pytest.mark.parametrize("make", [sgd(), two_groups(), *SCHEDULERS.values()])
@pytest.mark.parametrize("before", [None, lambda step: 0.5])
def test_a_rate_of_zero_moves_nothing(make, before):
    def stopped(parameters):
        optimizer = make(parameters)
        set_learning_rate(optimizer, 0.0)  # as --lr does
        return optimizer

    half = Run(make, before).train(4)
    assert torch.equal(half.resumed(stopped).train(3).values(), half.values())
    assert not torch.equal(half.resumed(make).train(3).values(), half.values())


def test_what_is_set_now_wins_and_the_state_stays():
    half = Run(sgd()).train(4)
    changed = half.resumed(sgd(lr=0.03, momentum=0.5, weight_decay=0.2))
    (group,) = changed.optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.03, 0.5, 0.2)
    for mine, theirs in zip(changed.parameters, half.parameters, strict=True):
        kept = [run.optimizer.state[p]["momentum_buffer"] for run, p in ((changed, mine), (half, theirs))]
        assert torch.equal(*kept) and kept[0].any()
    by_hand = copy.deepcopy(half)
    by_hand.optimizer.param_groups[0].update(lr=0.03, momentum=0.5, weight_decay=0.2)
    assert torch.equal(changed.train(3).values(), by_hand.train(3).values())


def test_groups_change_one_by_one():
    changed = Run(two_groups()).train(4).resumed(two_groups(second=0.005, betas=(0.8, 0.99)))
    first, second = changed.optimizer.param_groups
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.1, 0.005, 0.5)
    assert first["betas"] == second["betas"] == (0.8, 0.99)
    assert float(changed.optimizer.state[changed.parameters[0]]["step"]) == 4


def test_a_schedule_begins_ends_and_meets_other_rates_on_resume():
    halve = lambda step: 0.5  # noqa: E731
    assert Run(sgd(), halve).train(4).resumed(sgd()).optimizer.param_groups[0]["lr"] == 0.1
    begun = Run(sgd()).train(4).resumed(sgd(), halve).train(1)
    assert begun.optimizer.param_groups[0]["lr"] == 0.05
    other = Run(sgd(), halve).train(4).resumed(sgd(lr=0.4), halve).train(1)
    assert other.optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [(StepLR, {"step_size": 3, "gamma": 0.5}), (LambdaLR, {"lr_lambda": lambda n: 1 / (n + 1)})],
)
def test_a_jobs_own_scheduler_keeps_its_count_and_follows_another_rate(scheduler, settings):
    half = Run(scheduled(sgd(lr=0.1), scheduler, **settings)).train(4)
    changed = half.resumed(scheduled(sgd(lr=0.4), scheduler, **settings))
    for _ in range(5):
        half.train(1), changed.train(1)
        rates = [run.optimizer.param_groups[0]["lr"] for run in (half, changed)]
        assert rates[1] == pytest.approx(4 * rates[0], rel=1e-12)
    assert attached_schedulers(changed.optimizer)[0].last_epoch == 9


def test_another_setting_of_a_jobs_own_scheduler_acts():
    half = Run(scheduled(sgd(), StepLR, step_size=3, gamma=0.5)).train(3)
    changed = half.resumed(scheduled(sgd(), StepLR, step_size=3, gamma=0.1)).train(3)
    assert changed.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * 0.1)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (Adam, {"amsgrad": True}),
        (RMSprop, {"centered": True}),
        (RMSprop, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9}),
    ],
)
def test_an_option_that_keeps_more_state_begins_it_when_it_is_turned_on(make, option):
    half = Run(lambda p: make(p, lr=0.01)).train(4)
    moved = half.resumed(lambda p: make(p, lr=0.01, **option)).train(3)
    assert moved.values().isfinite().all() and not torch.equal(moved.values(), half.values())
    off = moved.resumed(lambda p: make(p, lr=0.01)).train(2)  # and off again
    assert off.values().isfinite().all()
