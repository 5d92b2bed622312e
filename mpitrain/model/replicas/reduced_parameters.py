"""Dense parameters that no server holds: each worker steps them with the mean of all workers' gradients.

    g = sum of share_i g_i / sum of share_i  over the workers i        w <- step of the job's optimizer on g

What a worker brings to the all-reduce is one vector: its gradient times its share, and the share, which is 0 where the
gradient is not finite.

Invariants: all workers take the same steps, so they hold the same numbers, and one that has stepped says what all hold.
Virtual workers share the parameters, and the first of them to have come round steps for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.model.copies import copied
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.recipe import UpdateRule
from mpitrain.system import trace


class ReducedParameters:
    """The dense parameters of one process.

    Args:
        parameters: all of one dtype; optimizer: the job's, which steps those that have a gradient.
        rule: how the mean gradient becomes an update; shares are counted in that of a full batch, so that equal ones
            change no bit.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: Optimizer,
        rule: UpdateRule,
    ):
        self.parameters, self.optimizer, self.law = list(parameters), optimizer, rule.law
        self._rates = Rates(optimizer)
        self.updates = rule.begin(self._rates, lambda: self.parameters)
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.num_rounds = 0  # whose means have come, stepped with or not
        trace.watch(self, step=("optimizer", trace.OPTIMIZER))

    def vector(self) -> torch.Tensor:
        """Room for what one worker brings, in host memory."""
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        return torch.zeros(sum(self._sizes) + 1, dtype=dtype)

    @torch.no_grad()
    def gather(self, vector: torch.Tensor, share: float) -> None:
        """Put what backward has left on the parameters into `vector`; a missing gradient counts as zero."""
        vector.zero_()
        weight = share / self.law.batch_size if self.law.num_workers > 1 else 1.0
        targets, sources = [], []
        for parameter, target in zip(self.parameters, self._cut(vector), strict=True):
            if parameter.grad is not None:
                targets.append(target)
                sources.append(parameter.grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        if weight != 1.0:
            vector[:-1].mul_(weight)
        vector[-1] = weight

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = vector[:-1].split(self._sizes)
        return [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def step(self, total: torch.Tensor, round_number: int, samples: int) -> None:
        """Take the step of round `round_number`, counted from 0, with the sum over all workers, after so many accepted
        samples; nothing where another virtual worker has taken it."""
        if round_number < self.num_rounds:
            return
        assert round_number == self.num_rounds, "a step of a round to come"
        self.num_rounds += 1
        share = float(total[-1])
        if not share:
            return
        if share != 1.0:
            total[:-1].mul_(1.0 / share)
        self.updates.follow(samples, self.law.num_workers)
        for parameter, gradient in zip(self.parameters, self._cut(total), strict=True):
            parameter.grad = gradient.to(parameter.device)
        self.updates.shape(lambda: [one.grad for one in self.parameters if one.grad is not None])
        with torch.enable_grad():  # as an optimizer's own step expects, and its hooks
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Parameters and what the optimizer remembers of them; tensors are copies."""
        saved, mine = self._rates.state(), {id(parameter) for parameter in self.parameters}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        saved["state"] = {number: one for number, one in saved["state"].items() if id(every[number]) in mine}
        parameters = [parameter.detach() for parameter in self.parameters]
        kept: dict[str, Any] = copied({"parameters": parameters, "optimizer": saved})
        return kept

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
        self._rates.restore(state["optimizer"])
