"""BatchNorm over the batches of all ranks (torch's SyncBatchNorm, which refuses a host's tensors).

    forward     counts, sums and sums of squares of all ranks are added up: mean and variance of the whole batch
    backward    sums of the gradient, and of the gradient times the normalized input, are added up

Invariants: N ranks compute what one process computes with the batches of all of them, running statistics included,
which are the same on all ranks. A layer keeps its parameters, their names and its type, so whoever looks at a model
sees it as it was. Ranks meet in every forward and backward pass of the training, and in no other one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from mpitrain.torch_versions import BatchNorm


class Statistics(NamedTuple):
    """Of the batches of all ranks; mean and variance are by channel, in float64."""

    num_values: float
    counts: bool  # whether those of this rank are among them
    mean: torch.Tensor
    variance: torch.Tensor


def sync_batchnorm(module: nn.Module) -> None:
    """Let the BatchNorm layers in `module`, if there are any, normalize over the batches of all ranks of the default
    group; where there is none, and on a single rank, they stay what they are."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            kind: Any = type(layer)
            layer.__class__ = _synchronized(kind)


def count_batch(module: nn.Module, counts: bool) -> None:
    """Whether the samples of the batch to come are this rank's share of the step. A rank that has no batch left
    computes one that is not, since the others wait for it."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            vars(layer)["_counts"] = counts


@functools.cache
def _synchronized(kind: Any) -> Any:
    """The same kind of layer, with statistics of all ranks. A class, not a function on the layer: copies of a model
    have to move their own statistics."""
    # marked here and not where it is defined: the mark imports torch's compiler, a second of CPU
    normalize = torch.compiler.disable(_normalize)

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized() and dist.get_world_size() > 1:
            synchronized: torch.Tensor = normalize(self, inputs)
            return synchronized
        normalized: torch.Tensor = kind.forward(self, inputs)
        return normalized

    same = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), same)


def _normalize(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    layer._check_input_dim(inputs)
    statistics = _statistics(inputs, vars(layer).get("_counts", True))
    if layer.track_running_stats and layer.running_mean is not None:
        _move_running(layer, statistics)
    normalized: torch.Tensor = _Normalize.apply(inputs, layer.weight, layer.bias, statistics, layer.eps)
    return normalized


@torch.no_grad()
def _statistics(inputs: torch.Tensor, counts: bool) -> Statistics:
    """Mean and variance of the inputs of all ranks; collective."""
    num_channels, count = inputs.shape[1], inputs.numel() // max(1, inputs.shape[1])
    sums = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device=inputs.device)
    if counts and count:
        # local deviations from the local mean: their squares lose no digits, however large the mean is
        variance, mean = torch.var_mean(_wide(inputs), _all_but_channels(inputs), correction=0)
        mean, variance = mean.double(), variance.double()
        sums[0] = count
        sums[1 : num_channels + 1] = count * mean
        sums[num_channels + 1 :] = count * (variance + mean * mean)
    dist.all_reduce(sums)
    total = float(sums[0])
    if total <= 1:
        raise ValueError(
            f"BatchNorm needs more than one value per channel in a step of all ranks, got {total:g} of an input of "
            f"shape {tuple(inputs.shape)}"
        )
    mean, squares = (sums[1:] / total).split(num_channels)
    return Statistics(total, counts, mean, (squares - mean * mean).clamp_min_(0.0))


@torch.no_grad()
def _move_running(layer: Any, statistics: Statistics) -> None:
    """As torch's layers do it: the variance is the unbiased one."""
    count, _, mean, variance = statistics
    layer.num_batches_tracked.add_(1)
    momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance * (count / (count - 1)))):
        running.mul_(1.0 - momentum).add_(new.to(running.dtype), alpha=momentum)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the backward pass of all ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, statistics: Statistics, eps: float) -> Any:
        kind = _wide_dtype(inputs)
        mean, variance = statistics.mean.to(kind), statistics.variance.to(kind)
        ctx.save_for_backward(inputs, weight, mean, torch.rsqrt(statistics.variance + eps).to(kind))
        ctx.statistics, ctx.has_bias = statistics, bias is not None
        return nn.functional.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs, weight, mean, inverse = ctx.saved_tensors
        dims, shape = _all_but_channels(inputs), _channel_shape(inputs)
        deviation = (_wide(inputs) - mean.view(shape)) * inverse.view(shape)
        wide = gradient.to(deviation.dtype)
        own = torch.stack([wide.sum(dims), (wide * deviation).sum(dims)])
        to_inputs = None
        if ctx.needs_input_grad[0]:
            sums = own.to(torch.float64, copy=True)
            dist.all_reduce(sums)
            mean_gradient, mean_product = (sums / ctx.statistics.num_values).to(deviation.dtype)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            if ctx.statistics.counts:  # or else mean and variance do not depend on these inputs
                wide = wide - mean_gradient.view(shape) - deviation * mean_product.view(shape)
            to_inputs = (wide * scale.view(shape)).to(inputs.dtype)
        to_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        to_bias = own[0].to(gradient.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return to_inputs, to_weight, to_bias, None, None


def _wide_dtype(inputs: torch.Tensor) -> torch.dtype:
    """What 16-bit numbers are added up in."""
    return torch.promote_types(inputs.dtype, torch.float32)


def _wide(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.to(_wide_dtype(inputs))


def _all_but_channels(inputs: torch.Tensor) -> list[int]:
    return [dim for dim in range(inputs.dim()) if dim != 1]


def _channel_shape(inputs: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (inputs.dim() - 2)
