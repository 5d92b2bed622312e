"""The scale of losses that are computed in float16, by hand: half and again on an overflow, twice after many steps."""

import math

import pytest
import torch
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.model.gradient.precision import (
    LARGEST,
    START,
    STEPS_TO_GROW,
    LossScale,
    autocast,
    autocast_forward,
    backward_scaled,
    check_float32,
    loss_scale,
)


class Overflowing:
    """A loss of gradient 3 that is not finite where the factor passes `most`."""

    def __init__(self, most: float):
        self.module = nn.BatchNorm1d(2, affine=False)
        self.module.register_parameter("w", nn.Parameter(torch.zeros(2)))
        self.most, self.factors = most, []

    def backward(self, factor: float) -> str:
        assert self.module.w.grad is None
        self.factors.append(factor)
        self.module.running_mean += 1.0
        self.module.w.grad = torch.full((2,), 3.0 * factor if factor <= self.most else math.inf)
        return f"of {factor}"

    def run(self, scale: LossScale | None) -> str:
        self.module.w.grad = None
        return backward_scaled(scale, self.module, self.backward, lambda: [self.module.w.grad])


def test_what_overflows_is_done_again_at_half_the_factor_and_counts_once():
    told, scale = Overflowing(START / 4), LossScale()
    assert told.run(scale) == f"of {START / 4}"
    assert told.factors == [START, START / 2, START / 4] and scale.factor == START / 4
    assert told.module.w.grad.tolist() == [3.0, 3.0]
    assert told.module.running_mean.tolist() == [1.0, 1.0]
    assert told.run(scale) == f"of {START / 4}" and len(told.factors) == 4
    assert told.module.w.grad.tolist() == [3.0, 3.0]


def test_without_a_scale_it_is_done_once_as_it_is():
    told = Overflowing(0.0)
    assert told.run(None) == "of 1.0" and told.factors == [1.0]
    assert loss_scale("bfloat16") is None and isinstance(loss_scale("float16"), LossScale)


def test_what_is_finite_at_no_factor_is_left_as_it_is_and_the_scale_begins_anew():
    told, scale = Overflowing(0.0), LossScale()
    assert told.run(scale) == "of 1.0"
    assert told.factors == [2.0**power for power in range(16, -1, -1)] and scale.factor == START
    assert told.module.w.grad.tolist() == [math.inf, math.inf] and told.module.running_mean[0] == 1.0


def test_the_factor_doubles_after_so_many_finite_steps_in_a_row_up_to_its_largest():
    scale = LossScale()
    for power in (17, 18):
        for _ in range(STEPS_TO_GROW - 1):
            scale.count_step()
        assert scale.factor == 2.0 ** (power - 1)
        scale.count_step()
        assert scale.factor == 2.0**power
    for _ in range(STEPS_TO_GROW - 1):
        scale.count_step()
    assert scale.shrink() and scale.factor == 2.0**17
    scale.count_step()
    assert scale.factor == 2.0**17  # they count from the overflow on
    for _ in range(10 * STEPS_TO_GROW):
        scale.count_step()
    assert scale.factor == LARGEST
    scale.factor = 2.0
    assert scale.shrink() and scale.factor == 1.0 and not scale.shrink() and scale.factor == START


def test_what_a_precision_computes_in_and_what_it_asks_of_parameters():
    module = nn.Linear(2, 2)
    with autocast("float32", "cpu"):
        assert module(torch.ones(1, 2)).dtype == torch.float32
    with autocast("bfloat16", "cpu"):
        assert module(torch.ones(1, 2)).dtype == torch.bfloat16
    plain = module.forward
    autocast_forward(module, "float32", "cpu")
    assert module.forward == plain
    autocast_forward(module, "bfloat16", "cpu")
    assert module(torch.ones(1, 2)).dtype == torch.bfloat16
    check_float32(module, "bfloat16")
    module.register_parameter("counts", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    check_float32(module, "bfloat16")
    check_float32(module.double(), "float32")
    with pytest.raises(UsageError, match="weight is float64"):
        check_float32(module, "float16")
