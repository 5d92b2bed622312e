"""An optimizer's step with what surrounds it: hooks, profilers, the counts of schedulers. Of a step that servers take,
by the optimizer rebuilt there, the hooks of the user's run on the worker.

Invariants: hooks see what torch would show them: the user's optimizer, this worker's own gradients before the step, and
the parameters after it. What they do to gradients and to the options of parameter groups acts; the parameters belong to
the servers, so a hook that changes them is refused, never forgotten.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import is_torchs_elementwise
from mpitrain.model.optimizers.sliced_step import SlicedStep, has_large
from mpitrain.torch_versions import global_step_hooks, profiler, step_alone

_WAY_OUT = 'use optimizer="worker", under which the whole step is taken on the worker'


class StepHooks:
    """The hooks of `optimizer`, and torch's global ones, around a step that it does not take itself.

    Args:
        parameters: those that the optimizer would update.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]):
        self.optimizer, self._parameters = optimizer, parameters

    @property
    def _before(self) -> list[Callable[..., Any]]:
        return [*global_step_hooks()[0].values(), *self._own("pre")]

    @property
    def _after(self) -> list[Callable[..., Any]]:
        return [*self._own("post"), *global_step_hooks()[1].values()]

    def _own(self, when: str) -> list[Callable[..., Any]]:
        return list(getattr(self.optimizer, f"_optimizer_step_{when}_hooks", {}).values())

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    def before(self, closure: object = None) -> None:
        """The hooks before the step.

        Raises:
            UsageError: a hook changes parameters, or hands the step other arguments.
        """
        with self._watched("pre", self._before) as hooks:
            for hook in hooks:
                if hook(self.optimizer, self._arguments(closure), {}) is not None:
                    raise UsageError(
                        f"the step pre-hook {_name(hook)} hands other arguments to the optimizer's step, which is "
                        f"taken on the servers; {_WAY_OUT}"
                    )

    def after(self, closure: object = None) -> None:
        """The hooks after the step.

        Raises:
            UsageError: a hook changes parameters.
        """
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without
        with self._watched("post", self._after) as hooks:
            for hook in hooks:
                hook(self.optimizer, self._arguments(closure), {})

    def _arguments(self, closure: object) -> tuple[Any, ...]:
        return (self.optimizer,) if closure is None else (self.optimizer, closure)

    @contextlib.contextmanager
    def _watched(self, when: str, hooks: list[Callable[..., Any]]) -> Iterator[list[Callable[..., Any]]]:
        """The hooks; a copy of the parameters shows afterwards whether one has changed them."""
        if not hooks:
            yield hooks
            return
        copies = [parameter.detach().clone() for parameter in self._parameters]
        yield hooks
        for parameter, copy in zip(self._parameters, copies, strict=True):
            if not torch.equal(parameter.detach(), copy):
                names = ", ".join(map(_name, hooks))
                raise UsageError(
                    f"a step {when}-hook of the optimizer ({names}) changes parameters on a worker, which the next "
                    f"answer of the servers would undo; {_WAY_OUT}"
                )


def _name(hook: Callable[..., object]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """A server's step: hooks are the workers' affair, and a slice of the parameters is not what they expect."""
    registries = global_step_hooks()
    if not any(registries):
        yield
        return
    held = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, held, strict=True):
            registry.update(hooks)


class ServerStep:
    """The step of a server's optimizer, without hooks."""

    def __init__(self, optimizer: Optimizer):
        alone = step_alone(optimizer)
        self._optimizer, self._alone = optimizer, alone and SlicedStep(optimizer, alone)
        self._is_profiled, *_ = profiler()

    def __call__(self) -> None:
        if self._alone is None or self._is_profiled():
            with without_global_hooks():
                self._optimizer.step()
        else:
            with torch.no_grad():
                self._alone()


class OwnStep:
    """The step of an optimizer whose parameters are here whole: as `optimizer.step` is when this is made, and large
    tensors in slices where nobody can tell: one of torch's elementwise optimizers, with no hooks and no profiler."""

    def __init__(self, optimizer: Optimizer):
        self._hooks, self._whole = StepHooks(optimizer, ()), optimizer.step
        alone = step_alone(optimizer) if is_torchs_elementwise(optimizer) and has_large(optimizer) else None
        self._sliced = alone and SlicedStep(optimizer, alone)
        self._is_profiled, *_ = profiler()

    @property
    def makes_at_most(self) -> float:
        """Bytes of one tensor that a step makes and drops."""
        return math.inf if self._sliced is None or self._hooks else self._sliced.slice_bytes

    def __call__(self) -> None:
        if self._sliced is None or self._hooks or self._is_profiled():
            self._whole()
            return
        self._hooks.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without
        with torch.no_grad():
            self._sliced()


def check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step was replaced on the instance: the servers would take the class's.

    Raises:
        UsageError: it was, and not by a learning rate scheduler, which only counts calls.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"the step of this {type(optimizer).__name__} was replaced on the instance, and the servers take that of "
            f"the class; {_WAY_OUT}"
        )


def check_whole(optimizer: Optimizer, strategy: str) -> None:
    """Refuse hooks before the step where an optimizer sees one stage of the model alone.

    Raises:
        UsageError: there is one; its gradients would not be those of the model, nor their norm the model's.
    """
    hooks = [
        *global_step_hooks()[0].values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ]
    if hooks:
        raise UsageError(
            f"the optimizer's step pre-hook {_name(hooks[0])} would see the gradients of one stage alone under "
            f"{strategy}: leave it out, or use strategy allreduce or sharded"
        )
