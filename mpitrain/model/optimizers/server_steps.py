"""What a worker keeps of an optimizer whose steps servers take: its hooks, and the options of its groups.

Invariants: the worker's optimizer is never stepped and holds no state; what the user attaches to it acts as it would
without servers. Options are read when a step is handed in, before the hooks after it, so a rate that a scheduler sets
there is the next step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.model.optimizers.group_options import ChangedOptions
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import StepHooks


class ServerSteps:
    """Of one worker.

    Args:
        optimizer: the user's, with the options that the servers start from; parameters: what it would update.

    Attributes:
        begun: hooks have run before a step, and not yet after it.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]):
        self.hooks, self.options = StepHooks(optimizer, parameters), ChangedOptions(optimizer)
        self._rates = Rates(optimizer)
        self.begun = False

    def begin(self) -> None:
        """The hooks before a step whose gradient is here."""
        self.hooks.before()
        self.begun = True

    def end(self, broken_off: bool) -> None:
        """The hooks after it, if it has begun and was not broken off."""
        begun, self.begun = self.begun, False
        if begun and not broken_off:
            self.hooks.after()

    def text(self, rates: Sequence[float] | None = None) -> str:
        """What the next push says of the options; `rates` in place of the groups' own."""
        return self.options.text(rates)

    def state(self) -> dict[str, Any] | None:
        """The groups' options and the counts of schedulers, as `Rates` keeps them; None where untouched."""
        return self._rates.state() if self.hooks or self.options.text() else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from what `state` returned; the servers are sent the options again."""
        if state is not None:
            self._rates.restore(state)
            self.options.always()
