"""Rebuilding a torch optimizer over slices of a flat vector.

Invariants: a server may only run an optimizer whose update of one element looks at no other element,
for then any slicing gives the same bits. What needs a whole layer (norms, matrices, line searches) is refused
with the reason, never approximated.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpitrain.errors import UsageError
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.strategies.base import ServerStrategy
from mpitrain.torch_versions import step_alone

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ASGD",
    "Rprop",
)

UNWEIGHABLE = (torch.optim.ASGD, torch.optim.Rprop)


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot run on slices.

    Raises:
        UsageError: its class is not one of torch's elementwise optimizers and does not declare itself
            `elementwise = True`.
    """
    if isinstance(optimizer, SeveralOptimizers):
        for one in optimizer.optimizers.values():
            check_elementwise(one)
        return
    cls = type(optimizer)
    if not _is_known(cls) and not getattr(cls, "elementwise", False):
        raise UsageError(
            f"optimizer {cls.__name__} cannot run on a parameter server: a server owns slices that cut through "
            f"layers, so only elementwise optimizers keep their meaning there ({', '.join(ELEMENTWISE)}). Use "
            f'optimizer="worker" of this strategy, under which each worker steps with its own {cls.__name__} and '
            f"pushes what the step has changed, or allreduce(); or set `{cls.__name__}.elementwise = True` if each "
            "element's update depends on that element alone"
        )


def check_weighable(optimizer: Optimizer, strategy: ServerStrategy) -> None:
    """Refuse weights for an optimizer whose steps no rate of the moment scales.

    Raises:
        UsageError: Rprop or ASGD, and a strategy that weighs gradients.
    """
    by = strategy.damping if strategy.damping.scales else strategy.batching
    if isinstance(optimizer, UNWEIGHABLE) and (strategy.damping.scales or strategy.batching.measures):
        raise UsageError(
            f"{strategy}: {by} weighs a gradient by scaling the learning rate of its update, and "
            f"{type(optimizer).__name__} keeps lengths of steps of its own, which no rate scales: use another "
            "optimizer, or leave that setting out"
        )


def is_torchs_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own that can run on slices."""
    return _is_known(type(optimizer))


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim") and cls.__name__ in ELEMENTWISE


def rebuild(prototype: Optimizer, slices: list[tuple[int, nn.Parameter]]) -> Optimizer:
    """A new optimizer of the prototype's class over `slices` of (parameter group index, 1-D parameter), with
    each group's options.
    """
    if isinstance(prototype, SeveralOptimizers):
        return _rebuild_several(prototype, slices)
    accepted = inspect.signature(type(prototype).__init__).parameters
    defaults = {key: value for key, value in prototype.defaults.items() if key in accepted}
    groups = [{**_options(prototype.param_groups[group]), "params": [piece]} for group, piece in slices]
    return type(prototype)(groups, **defaults)


def _rebuild_several(
    prototype: SeveralOptimizers, slices: list[tuple[int, nn.Parameter]]
) -> SeveralOptimizers:
    """Each of those of whose groups there are slices, which lie in the order of groups."""
    made, begin = {}, 0
    for name, one in prototype.optimizers.items():
        end = begin + len(one.param_groups)
        if own := [(group - begin, piece) for group, piece in slices if begin <= group < end]:
            made[name] = rebuild(one, own)
        begin = end
    return SeveralOptimizers(made)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")}


def check_closure(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that evaluates the loss by itself, several times a step.

    Raises:
        UsageError: its `step` demands a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss several times a step (its step demands a closure), and "
            f"{strategy} exchanges one gradient a step; use strategy allreduce with a loop of your own, or another "
            "optimizer"
        )


class Rates:
    """The options that an optimizer's parameter groups began with: a schedule's factor is applied to their rates, and a
    run that is resumed with other options takes these, while it keeps the optimizer's state.

    Args:
        groups: which group of the job's optimizer each group here is, where they are others.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[int] | None = None):
        self.optimizer = optimizer
        self._groups = list(groups) if groups is not None else list(range(len(optimizer.param_groups)))
        self._first = [_options(group) for group in optimizer.param_groups]
        found = attached_schedulers(optimizer)
        self._schedulers = sorted(found, key=lambda each: f"{type(each).__name__} {_numbers(each)}")
        self._counts = [_numbers(scheduler) for scheduler in self._schedulers]
        self._is_scheduled = False  # whether `set` makes the rates, and nobody else

    @property
    def first(self) -> list[dict[str, Any]]:
        """Each group's options at first."""
        return [{key: _copy(value) for key, value in group.items()} for group in self._first]

    def set(self, factor: object) -> None:
        """Every group's rate becomes `factor` times what it was at first; or, where that is a list, the groups of the
        job's optimizer get these options."""
        self._is_scheduled = True
        if isinstance(factor, list):
            for group, index in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update({key: _copy(value) for key, value in factor[index].items() if key in group})
            return
        for group, first in zip(self.optimizer.param_groups, self._first, strict=True):
            group["lr"] = first["lr"] * factor

    def state(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, what its groups began with, and the counts of torch schedulers that the job has
        attached to it; tensors are not copied."""
        counts = [[first, _numbers(each)] for first, each in zip(self._counts, self._schedulers, strict=True)]
        added = [_options(group) for group in self.optimizer.param_groups[len(self._first) :]]  # since then
        more = {"first": self._first + added, "schedulers": counts, "is_scheduled": self._is_scheduled}
        return {**self.optimizer.state_dict(), **more}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `state` returned. An option that began otherwise than here was changed by whoever started
        this run, and is taken from here; every other one stays as training has left it."""
        pairs = zip(saved["param_groups"], saved["first"], strict=True)
        groups = [
            _merged(first, *pair, bool(saved["is_scheduled"]))
            for first, pair in zip(self._first, pairs, strict=True)
        ]
        self.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        _begin_missing(self.optimizer)
        if len(saved["schedulers"]) == len(self._schedulers):
            for scheduler, first, pair in zip(
                self._schedulers, self._counts, saved["schedulers"], strict=True
            ):
                began, now = pair
                same = [key for key in first if key in began and _same(first[key], began[key])]
                vars(scheduler).update({key: now[key] for key in same})


def _merged(
    first: dict[str, Any], saved: dict[str, Any], saved_first: dict[str, Any], is_scheduled: bool
) -> dict[str, Any]:
    """A saved group, which began as `saved_first`, for a run whose group begins as `first`. A rate that a scheduler of
    the job's own has made is kept in proportion; one that our schedule has made is made anew before the next step."""
    changed = [key for key in first if not (key in saved_first and _same(first[key], saved_first[key]))]
    merged = {**saved, **{key: _copy(first[key]) for key in changed if key != "lr"}}
    base = "initial_lr" if "initial_lr" in first and "initial_lr" in saved_first else "lr"
    if "lr" in first and is_scheduled:
        merged["lr"] = _copy(first["lr"])
    elif base in changed:
        merged["lr"] = _rescaled(saved["lr"], saved_first.get(base), first[base])
        if "initial_lr" in saved and base == "lr":
            merged["initial_lr"] = _rescaled(saved["initial_lr"], saved_first.get(base), first[base])
    return merged


# What an optimizer's state has only while an option is on, and an entry of the same shape: it then begins at zero.
_BEGINS = (
    ("amsgrad", "max_exp_avg_sq", "exp_avg_sq"),
    ("centered", "grad_avg", "square_avg"),
    ("momentum", "momentum_buffer", "square_avg"),
)


def _begin_missing(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            for option, missing, like in _BEGINS:
                if group.get(option) and like in state and missing not in state:
                    state[missing] = torch.zeros_like(state[like])


def _rescaled(rate: Any, before: Any, now: Any) -> Any:
    """A rate that a scheduler of the job's own has made of `before`, made of `now` instead."""
    if before is None or _same(rate, before) or not float(before):
        return _copy(now)
    return now * (rate / before)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, int | float | torch.Tensor) and float(one) == float(other)
    return bool(one == other)


def state_bytes(trained: Sequence[nn.Parameter], optimizer: Optimizer) -> int | None:
    """Of the optimizer's state after a step with gradients of zero, which it takes here; the parameters are put back.
    None: it cannot take one."""
    before = [one.detach().clone() for one in trained]
    for one in trained:
        one.grad = torch.zeros_like(one)
    alone = step_alone(optimizer)  # torch's own imports its compiler first
    try:
        if alone is None:
            optimizer.step()
        else:
            with torch.no_grad():
                alone()
        states = [one for state in optimizer.state.values() for one in state.values()]
        return sum(one.numel() * one.element_size() for one in states if isinstance(one, torch.Tensor))
    except Exception:  # such as one that wants a closure
        return None
    finally:
        with torch.no_grad():
            for one, old in zip(trained, before, strict=True):
                one.copy_(old)
                one.grad = None


def attached_schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    """torch's schedulers of this optimizer, which does not know them; they leave `initial_lr` in its groups."""
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return []
    found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    owners = [optimizer, *getattr(optimizer, "optimizers", {}).values()]
    return [each for each in found if any(getattr(each, "optimizer", None) is one for one in owners)]


def _numbers(scheduler: LRScheduler) -> dict[str, Any]:
    """A scheduler's settings and counts: plain numbers, and lists of them."""

    def plain(value: object) -> bool:
        return value is None or isinstance(value, bool | int | float | str)

    return {
        key: list(value) if isinstance(value, list) else value
        for key, value in vars(scheduler).items()
        if plain(value) or (isinstance(value, list) and all(map(plain, value)))
    }


def _copy(option: object) -> Any:
    return option.clone() if isinstance(option, torch.Tensor) else option


def coupled_decays(optimizer: Optimizer) -> list[float]:
    """Of each parameter group, the multiple of the parameters that the optimizer adds to the gradient it is handed; 0
    where it decays them apart from the gradient, or is no kin of torch's own."""
    if not any(_is_known(cls) for cls in type(optimizer).__mro__):
        return [0.0] * len(optimizer.param_groups)
    decays = []
    for group in optimizer.param_groups:
        coupled = not group.get("decoupled_weight_decay", False)
        sign = -1.0 if group.get("maximize", False) else 1.0  # where the gradient is turned round first
        decays.append(sign * group.get("weight_decay", 0.0) * coupled)
    return decays


@contextlib.contextmanager
def scaled(optimizer: Optimizer, rate: float, decay: float = 1.0) -> Iterator[None]:
    """For as long as the context lasts, multiply every group's learning rate by `rate`, and by `decay` the weight decay
    that goes by way of the gradient."""
    if rate == decay == 1.0:
        yield
        return
    before = [
        (group, key, group[key])
        for group in optimizer.param_groups
        for key in ("lr", "weight_decay")
        if key in group
    ]
    for group, coupled in zip(optimizer.param_groups, coupled_decays(optimizer), strict=True):
        if rate != 1.0:
            group["lr"] = group["lr"] * rate
        if decay != 1.0 and coupled:
            group["weight_decay"] = group["weight_decay"] * decay
    try:
        yield
    finally:
        for group, key, value in before:
            group[key] = value


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate, and torch's schedulers of it this rate to begin with."""
    for group in optimizer.param_groups:
        lr = group["lr"]
        given = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
        group["lr"] = _rescaled(lr, group["initial_lr"], given) if "initial_lr" in group else given
        if "initial_lr" in group:
            group["initial_lr"] = _copy(given)
    for scheduler in attached_schedulers(optimizer):
        scheduler.base_lrs = [_copy(group["initial_lr"]) for group in optimizer.param_groups]
