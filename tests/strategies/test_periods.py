"""When periodic averaging averages, and what its outer optimizers make of the mean."""

import pytest
import torch

from mpitrain import Average, DiLoCo, LocalSGD, SlowMo
from mpitrain.errors import UsageError
from mpitrain.model.optimizers.outer_optimizer import OuterOptimizer
from mpitrain.model.pieces import cut
from mpitrain.values import parse


def averaged_after(strategy, steps):
    """Numbers of the steps (from 1) after which all average."""
    memory, found = strategy.begin(), []
    for number, samples in enumerate(steps, 1):
        if strategy.on_step(memory, samples):
            found.append(number)
            strategy.on_average(memory)
    return found


def test_the_period_counts_steps_or_samples_from_the_start_on():
    assert averaged_after(LocalSGD(period=3), [10] * 10) == [3, 6, 9]
    assert averaged_after(LocalSGD(period=1), [10] * 3) == [1, 2, 3]
    assert averaged_after(LocalSGD(period=3, start=4), [10] * 11) == [7, 10]
    assert averaged_after(LocalSGD(period=25, unit="samples"), [10, 10, 4, 10, 10, 10]) == [4]
    assert averaged_after(LocalSGD(period=20, unit="samples", start=15), [10] * 6) == [4, 6]


def test_gradients_are_averaged_until_the_start():
    strategy = LocalSGD(start=2)
    memory = strategy.begin()
    told = []
    for _ in range(4):
        told.append(strategy.averages_gradients(memory))
        strategy.on_step(memory, 1)
    assert told == [True, True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "localsgd(period=8,outer=diloco(),wire='int8')",
        "localsgd(start=5,outer=slowmo(beta=0.2))",
        "localsgd()",
    ],
)
def test_text_round_trips(text):
    assert str(parse(text, "strategy")) == text


@pytest.mark.parametrize(
    "text",
    ["localsgd(0)", "localsgd(unit='epochs')", "localsgd(wire='fp8')", "localsgd(outer=slowmo(beta=1))",
     "localsgd(outer=diloco(rate=0))", "localsgd(outer=keep())", "localsgd(start=-1)"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError):
        parse(text, "strategy")


def path(outer, targets, rates):
    """x after each round, all workers having been pulled to `targets[k]` in round k."""
    optimizer, x, found = OuterOptimizer(outer), torch.zeros(3, dtype=torch.float64), []
    for target, rate in zip(targets, rates, strict=True):
        x = step(optimizer, x, target, rate)
        found.append(x)
    return found


def step(optimizer, x, target, rate):
    """x after the next outer step, whose xbar is `target`, taken in two pieces."""
    mean = target.clone()
    optimizer.begin([x], [rate])
    for piece in cut([x], piece_bytes=16):
        optimizer.move(piece, piece.of([mean]), piece.of([x - target]))
    return mean


TARGETS = list(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def test_diloco_is_torchs_nesterov_on_the_difference():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    nesterov = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for target, got in zip(TARGETS, path(DiLoCo(0.7, 0.9), TARGETS, [0.1] * 6), strict=True):
        parameter.grad = parameter.detach() - target
        nesterov.step()
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_slowmo_keeps_its_momentum_in_units_of_the_rate():
    rates = [0.1, 0.1, 0.05, 0.05, 0.01, 0.02]
    x = u = torch.zeros(3, dtype=torch.float64)
    for target, rate, got in zip(TARGETS, rates, path(SlowMo(0.6, 0.9), TARGETS, rates), strict=True):
        u = 0.6 * u + (x - target) / rate
        x = x - 0.9 * rate * u
        torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outer", [Average(), SlowMo(0.0, 1.0), DiLoCo(1.0, 0.0)], ids=str)
def test_without_momentum_and_with_rate_one_the_mean_is_taken_to_the_bit(outer):
    for target, got in zip(TARGETS, path(outer, TARGETS, [0.3] * 6), strict=True):
        assert torch.equal(got, target)


def test_a_restored_outer_optimizer_goes_on_to_the_bit():
    whole = path(SlowMo(0.6), TARGETS, [0.1] * 6)
    first = OuterOptimizer(SlowMo(0.6))
    x = torch.zeros(3, dtype=torch.float64)
    for number, target in enumerate(TARGETS):
        if number == 3:
            state, first = first.state(), OuterOptimizer(SlowMo(0.6))
            first.restore(state)
        x = step(first, x, target, 0.1)
        assert torch.equal(x, whole[number])
