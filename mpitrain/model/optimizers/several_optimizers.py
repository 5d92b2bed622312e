"""Several optimizers, each of a part of the model, as one: for all that looks at an optimizer without stepping it.

Invariants: groups and state are those of the optimizers, in their order, so whoever sets a rate or restores state
reaches the optimizer that steps. Each parameter belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from mpitrain.errors import UsageError


class SeveralOptimizers(Optimizer):
    """The optimizers of a job by name.

    Raises:
        UsageError: two of them hold the same parameter.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]):
        self.optimizers = dict(optimizers)  # Optimizer.__init__ would make groups of its own
        # On a server: whose gradients are gathered; "" of none, at a batch's end; None where nothing is gathered yet.
        self.turn: str | None = None
        self.defaults = {key: value for one in optimizers.values() for key, value in one.defaults.items()}
        holders: dict[int, str] = {}
        for name, one in self.optimizers.items():
            for parameter in (each for group in one.param_groups for each in group["params"]):
                other = holders.setdefault(id(parameter), name)
                if other != name:
                    raise UsageError(
                        f"Job: the optimizers {other!r} and {name!r} hold the same parameter, of shape "
                        f"{tuple(parameter.shape)}; give each the parameters of a part of its own"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all of them."""
        return [group for one in self.optimizers.values() for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """What all of them remember, by parameter."""
        return {parameter: kept for one in self.optimizers.values() for parameter, kept in one.state.items()}

    def step(self, closure: object = None) -> Any:
        """Step the one whose turn it is, on a server; elsewhere the job's step function steps each by name."""
        assert self.turn is not None, "several optimizers are stepped by name"
        if (one := self.optimizers.get(self.turn)) is not None:  # or none of its parameters are here
            return one.step()

    def begin_with(self, parameter: Any, state: dict[str, Any]) -> None:
        """What the optimizer of this parameter remembers of it."""
        for one in self.optimizers.values():
            if any(each is parameter for group in one.param_groups for each in group["params"]):
                one.state[parameter] = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all of them."""
        for one in self.optimizers.values():
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer that has all groups; parameters are counted through."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        begin = 0
        for one in self.optimizers.values():
            saved = one.state_dict()
            state |= {index + begin: kept for index, kept in saved["state"].items()}
            groups += [_moved(group, begin) for group in saved["param_groups"]]
            begin += sum(len(group["params"]) for group in saved["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` has returned."""
        groups, begin = list(state_dict["param_groups"]), 0
        for one in self.optimizers.values():
            own, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            end = begin + sum(len(group["params"]) for group in own)
            state = {
                index - begin: kept for index, kept in state_dict["state"].items() if begin <= index < end
            }
            one.load_state_dict({"state": state, "param_groups": [_moved(group, -begin) for group in own]})
            begin = end

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizers!r})"


def _moved(group: dict[str, Any], by: int) -> dict[str, Any]:
    return {**group, "params": [index + by for index in group["params"]]}
