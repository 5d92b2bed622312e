"""A wrap in two steps, for frameworks that are handed model and optimizer first and told then whether to go on from a
checkpoint.

Invariants: all ranks share the first rank's parameters at once. Servers stay in here from then on; workers begin
together, at the latest with the first forward pass that trains, and tell the servers what is gone on from.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.mpi.runtime import start
from mpitrain.training.measure import share_module
from mpitrain.wrapping import beside, loop
from mpitrain.wrapping.membership import Membership


class Preparing:
    """Of one model and its optimizer.

    Args:
        member: this process; options: of `mt.wrap`.
    """

    def __init__(self, member: Membership, model: nn.Module, optimizer: Optimizer, **options: Any):
        self._member, self._model, self.optimizer, self._options = member, model, optimizer, options
        self.begun, self.num_steps = False, 0
        self._at_first: dict[str, Any] | None = copy.deepcopy(optimizer.state_dict())
        beside.begin_anew()
        share_module(start(), model)
        if member.serves:
            self._begin(None)
        self._hooks = [module.register_forward_pre_hook(self._look) for module in model.modules()]

    def begin(self, resume: Path | None = None) -> None:
        """On workers, all together; what comes later does nothing.

        Raises:
            UsageError: training has begun, and is to go on from elsewhere.
        """
        if self.begun and resume is not None:
            raise UsageError(
                f"{self._member.strategy}: training has begun, and cannot go on from {resume} now: load the checkpoint "
                "before the first step"
            )
        if not self.begun:
            for hook in self._hooks:
                hook.remove()
            self._begin(resume)

    def _look(self, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled() and self._model.training:
            self.begin()

    def _begin(self, resume: Path | None) -> None:
        self.begun, at_first, self._at_first = True, self._at_first, None
        if (
            resume is not None and at_first is not None
        ):  # the framework has loaded what it has of it, on workers
            self.optimizer.load_state_dict(at_first)
        place = None if resume is None else str(resume)
        place = start().broadcast(place, root=self._member.roles.workers[0])
        self.optimizer.register_step_post_hook(self._count)
        loop.wrap(self._model, self.optimizer, self._member.strategy, place, **self._options)
        begun = loop.resumed()
        self.num_steps = begun.step if begun is not None else 0

    def _count(self, *_: object) -> None:
        self.num_steps += 1
