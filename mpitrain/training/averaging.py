"""Averaging what the workers hold, when the rule says so: parameters, optimizer state, buffers.

Law of this file: all ranks call the same in the same order, because the rule goes by counts alone; what one rank alone
knows (a gradient that is not finite) is told to all with the next averaging, and not before. Every rank leaves an
averaging with the same parameters, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mpitrain.model.flat import trainable
from mpitrain.model.outer import OuterOptimizer
from mpitrain.rules.averaging import LocalSGD
from mpitrain.training.means import Means


class Averager:
    """The workers' parameters between two averagings, on one rank.

    Args:
        module, optimizer: the worker's own.
        strategy: when and how to average.
        group: the workers, default all ranks.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, strategy: LocalSGD, group: Any = None):
        self.module, self.optimizer, self.strategy, self.group = module, optimizer, strategy, group
        entries = trainable(module, optimizer)
        self.parameters: list[torch.Tensor] = [parameter for _, parameter, _ in entries]
        self._groups = [index for _, _, index in entries]
        self.memory = strategy.begin()
        self.outer = OuterOptimizer(strategy.outer)
        self.means = Means(strategy.wire, group)
        self.num_averagings, self.drift = 0, 0.0
        self._anchor: list[torch.Tensor] = []

    @property
    def averages_gradients(self) -> bool:
        """Whether the step to come is one of allreduce."""
        return self.strategy.averages_gradients(self.memory)

    @property
    def is_apart(self) -> bool:
        """Whether workers may hold different parameters now."""
        return bool(self.memory["since"])

    def begin_step(self) -> None:
        """Before the first local step of a round: remember what all hold."""
        if self.strategy.keeps_anchor and not self._anchor and not self.averages_gradients:
            self._anchor = [parameter.detach().clone() for parameter in self.parameters]

    def end_step(self, samples: int = 1) -> bool:
        """A step of all workers over `samples` samples was taken: whether `average` is due."""
        return self.strategy.on_step(self.memory, samples)

    def tell(self, *numbers: int) -> torch.Tensor:
        """Everybody's `numbers`, one row a rank."""
        own = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, own, group=self.group)
        return torch.stack(rows)

    @torch.no_grad()
    def average(self) -> None:
        """All workers take the mean of what they hold, and the outer step from there."""
        means, differences = self._mean_and_difference()
        self.drift = _distance(self.parameters, means)
        rates = [float(self.optimizer.param_groups[index]["lr"]) for index in self._groups]
        new = self.outer.step(means, differences, rates)
        torch._foreach_copy_(self.parameters, new)
        if self._anchor:
            torch._foreach_copy_(self._anchor, self.parameters)
        if self.strategy.average_buffers:
            self._into(floating(self.module.buffers()))
        if self.strategy.average_optimizer:
            self._average_optimizer()
        self.strategy.on_average(self.memory)
        self.num_averagings += 1

    @torch.no_grad()
    def mean_parameters(self) -> list[torch.Tensor]:
        """The mean of what the workers hold, without a step: what a validation in mid-round measures."""
        return self.means.take(self.parameters, full=True)

    def _mean_and_difference(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self.strategy.wire == "full":
            means = self.means.take(self.parameters)
            return means, list(torch._foreach_sub(self._anchor, means)) if self._anchor else []
        differences = self.means.take(list(torch._foreach_sub(self._anchor, self.parameters)))
        return list(torch._foreach_sub(self._anchor, differences)), differences

    def _into(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            torch._foreach_copy_(tensors, self.means.take(tensors, full=True))

    def _average_optimizer(self) -> None:
        """Momenta of a worker that has not stepped yet do not exist: then nobody's are averaged this time."""
        tensors = [
            value
            for parameter in self.parameters
            for _, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        rows = self.tell(sum(tensor.numel() for tensor in tensors), len(tensors))
        if bool((rows == rows[0]).all()):
            self._into(tensors)

    def statistics(self) -> dict[str, float]:
        """Of the run so far: averagings, this rank's bytes for them, milliseconds an averaging spent rounding, and
        how far its parameters were from the mean at the last one, relative to the mean.
        """
        count = max(1, self.num_averagings)
        return {
            "averagings": self.num_averagings, "averaging_bytes": self.means.sent_bytes,
            "codec_ms": 1e3 * self.means.codec_s / count, "drift": self.drift,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Counts, x0, velocities and what the wire has rounded off; copies."""
        anchor = [tensor.clone() for tensor in self._anchor]
        return {
            "memory": dict(self.memory), "anchor": anchor, "outer": self.outer.state(),
            "means": self.means.state(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; parameters and the optimizer's state are the caller's."""
        self.memory = dict(state["memory"])
        self._anchor = [tensor.clone() for tensor in state["anchor"]]
        self.outer.restore(state["outer"])
        self.means.restore(state["means"])


def floating(tensors: Any) -> list[torch.Tensor]:
    """Those of floating dtype."""
    return [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point()]


def _distance(tensors: list[Any], means: list[torch.Tensor]) -> float:
    """|x - xbar| / |xbar|, Euclidean over all tensors."""
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub(list(tensors), means)))
    size = float(torch.stack(torch._foreach_norm(means)).norm())
    return float(apart.norm()) / size if size else 0.0
