"""What `mt.wrap` returns in place of the user's optimizer: a delegate, which is an optimizer to torch's schedulers and
scalers, and shares everything with the one it stands for.

Invariants: groups, state, defaults and hooks are the user's optimizer's own, looked up there each time, so whoever
holds either of the two sees and changes the same; a step asked of the user's optimizer is a step of the delegate.
"""

from __future__ import annotations

import types
from typing import Any

from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.model.optimizers.step_hooks import OwnStep

_SHARED = (
    "param_groups",
    "state",
    "defaults",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
)


class DelegatingOptimizer(Optimizer):
    """Base; subclasses say what a step is. `own_step` is that of the user's optimizer, its hooks included.

    Args:
        optimizer: the user's; strategy: under which, for messages.
    """

    def __init__(self, optimizer: Optimizer, strategy: str):
        self.inner, self.strategy = optimizer, strategy  # Optimizer.__init__ would make groups of its own
        self.own_step = OwnStep(optimizer)
        _redirect(optimizer, self)

    def step(self, closure: object = None) -> Any:
        """One step of this worker."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the user's optimizer's."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the user's optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's optimizer's."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after `wrap`, which has shared out what is trained.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"add_param_group after mpitrain.wrap: {self.strategy} has shared out the parameters that are trained; add "
            "the group before mpitrain.wrap (a rate of 0 keeps it still until then)"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.inner!r}"


def _share(name: str) -> property:
    def look(self: DelegatingOptimizer) -> Any:
        return getattr(self.inner, name)

    def change(self: DelegatingOptimizer, value: object) -> None:
        setattr(self.inner, name, value)

    return property(look, change)


for _name in _SHARED:
    setattr(DelegatingOptimizer, _name, _share(_name))


def _redirect(optimizer: Optimizer, delegate: DelegatingOptimizer) -> None:
    """Whoever kept the user's optimizer (a trainer, a scaler) and steps it, steps the delegate."""

    def step(self: Optimizer, *arguments: object, **named: object) -> Any:
        return delegate.step(*arguments, **named)

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        delegate.add_param_group(param_group)

    # what torch's schedulers look for before they wrap `step` themselves, to count calls
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
