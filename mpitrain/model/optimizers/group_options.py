"""The options of an optimizer's parameter groups (rate, momentum, weight decay, ...), as they travel with pushes.

Invariants: a push carries what differs from the options at the start, in full, so it means the same whatever came
before it. An update of one gradient takes the options that came with it; one of several takes, option by option, their
mean, which is the common value, to the bit, where all agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.errors import UsageError

Groups = list[dict[str, Any]]


def read_groups(optimizer: Optimizer) -> Groups:
    """The options of every group, as JSON knows them; only those that the optimizer's class names."""
    return [
        {key: _plain(key, group[key]) for key in optimizer.defaults if key in group}
        for group in optimizer.param_groups
    ]


def _plain(key: str, value: object) -> Any:
    if hasattr(value, "item") and getattr(value, "size", None) is not None and _is_single(value):
        value = value.item()  # of torch's and of numpy's numbers
    if isinstance(value, tuple | list):
        return [_plain(key, each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise UsageError(f"the option {key} of a parameter group is {value}: it must be finite")
    return f"{type(value).__qualname__}: not to be changed"  # equal as long as its type is


def _is_single(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else value.size == 1


class ChangedOptions:
    """What a worker's optimizer says of its groups, compared with what the servers started with.

    Args:
        optimizer: the user's; its groups as they are now are those that the servers know.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer, self.first = optimizer, read_groups(optimizer)
        self._differed = False

    def text(self, rates: Sequence[float] | None = None) -> str:
        """What to push along; empty until something has changed for the first time.

        Args:
            rates: of each group, in place of the optimizer's.

        Raises:
            UsageError: the groups are others than at the start, or an option was changed that cannot travel.
        """
        now = read_groups(self.optimizer)
        for index, rate in enumerate(rates or ()):
            now[index]["lr"] = rate
        if len(now) != len(self.first):
            raise UsageError(
                f"the optimizer has {len(now)} parameter groups and had {len(self.first)} when the servers took it "
                "over; add groups before mpitrain.wrap"
            )
        changed = {
            str(index): {key: value for key, value in group.items() if value != before.get(key)}
            for index, (group, before) in enumerate(zip(now, self.first, strict=True))
            if group != before
        }
        self._differed = self._differed or bool(changed)
        return json.dumps(changed) if self._differed else ""

    def always(self) -> None:
        """From here on say it even where nothing differs: the servers may hold other options."""
        self._differed = True


class FollowedOptions:
    """A server's side: the groups of a shard's optimizer, set to what came with the gradients of each update.

    Args:
        optimizer: of the shard; indices: which of the user's groups each of its groups is a slice of.
    """

    def __init__(self, optimizer: Optimizer, indices: Sequence[int]):
        self.optimizer, self.indices, self.first = optimizer, indices, read_groups(optimizer)
        self._texts: list[str] = []
        self.heard = False  # whether workers have changed any

    def hear_options(self, text: str) -> None:
        """The options of one more gradient of the update to come, where its worker says any."""
        if text:
            self._texts.append(text)
            self.heard = True

    def apply(self, num_gradients: int) -> None:
        """Set the groups for an update of so many gradients; those that nothing was said with came with the first.

        Raises:
            UsageError: an option without a mean (a flag, say) on which the gradients differ.
        """
        texts, self._texts = self._texts, []
        if not self.heard:
            return
        reported = [json.loads(text) for text in texts] + [{}] * (num_gradients - len(texts))
        for group, index, first in zip(self.optimizer.param_groups, self.indices, self.first, strict=True):
            for key, before in first.items():
                values = [groups.get(str(index), {}).get(key, before) for groups in reported]
                self._set(group, key, mean_option(key, values))

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        held = group[key]
        if isinstance(held, torch.Tensor):
            held.fill_(value)
        elif isinstance(held, tuple):
            group[key] = tuple(value)
        elif held is None or isinstance(held, bool | int | float | str | list):
            group[key] = value


def mean_option(key: str, values: Sequence[Any]) -> Any:
    """The value that all agree on, or else the mean, number by number.

    Raises:
        UsageError: they are not numbers.
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [mean_option(key, column) for column in zip(*values, strict=True)]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return sum(values) / len(values)
    raise UsageError(
        f"the gradients of one update came with different values of the option {key} ({', '.join(map(str, values))}), "
        "which have no mean: give all workers the same"
    )
