"""A job's step function, such as that of a GAN: it says what is computed of a batch, and which of several optimizers
steps when.

Invariants: whoever runs it says what becomes of the gradients of an optimizer's parameters before that steps: the mean
of all ranks, or this worker's own, clipped. Where a step is of several batches, the function is called with each; where
it steps an optimizer, the gradient is put by, and with the last batch the mean over the samples of all is stepped with.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mpitrain.data.read.batch import Batch, device_of
from mpitrain.data.read.batch_mistakes import explaining
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss_pass import naming_itself
from mpitrain.model.gradient.model_mistakes import explaining_model
from mpitrain.model.gradient.precision import autocast
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.optimizers.step_hooks import OwnStep
from mpitrain.system import trace


class NamedOptimizer:
    """An optimizer as the step function sees it: its own but for `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]):
        self.optimizer, self.step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class StepFunction:
    """A step function with its optimizers.

    Args:
        function: the job's; precision: in which torch computes what it asks for.
        optimizers: by name.
        prepare: makes the gradients of these parameters what is stepped with; returns whether it is.
        stepping: what surrounds a step.

    Attributes:
        losses: that it has returned last, by name, where it returns several.
    """

    def __init__(
        self, function: Callable[..., Any], precision: str, optimizers: SeveralOptimizers,
        prepare: Callable[[list[nn.Parameter]], bool],
        stepping: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):  # fmt: skip
        self.function, self.precision, self.prepare, self.stepping = function, precision, prepare, stepping
        self.optimizers = optimizers.optimizers
        self._steps = {name: OwnStep(one) for name, one in self.optimizers.items()}
        self.named = {
            name: NamedOptimizer(one, lambda name=name: self._stepped(name))  # type: ignore[misc]
            for name, one in self.optimizers.items()
        }
        self.losses: dict[str, float] = {}
        self._put_by: dict[tuple[str, int], list[torch.Tensor | None]] = {}
        self._calls: Counter[str] = Counter()
        self._weight, self._is_last = 1.0, True

    def run(
        self, module: nn.Module, parts: Iterable[tuple[Batch, int]], num_samples: int, seed: Callable[[int], None]
    ) -> float:  # fmt: skip
        """Call it with each batch of a step of so many samples; returns the loss to report, of several their sum.
        `seed(number)`: called before each batch.

        Raises:
            UsageError: it steps none of its optimizers, or others with one batch than with another; it returns no loss.
        """
        done, found = 0, dict[str, float]()
        module.train()
        for number, (batch, count) in enumerate(parts):
            done += count
            self._weight, self._is_last, self._calls = count / num_samples, done == num_samples, Counter()
            seed(number)
            with (
                trace.span("step function", trace.COMPUTE),
                naming_itself(module),
                explaining("Job: step", batch, UsageError),
                explaining_model("Job: step", module, batch),
                autocast(self.precision, device_of(batch).type),
            ):
                losses = _read_losses(self.function(module, self.named, batch))
            for name, value in losses.items():
                found[name] = found.get(name, 0.0) + value * self._weight
        if not self._calls:
            raise UsageError(
                "Job: the step function has stepped none of its optimizers; call optimizers[name].step() after the "
                "backward pass"
            )
        if self._put_by:
            left, self._put_by = sorted({name for name, _ in self._put_by}), {}
            raise UsageError(
                f"Job: the step function has stepped {', '.join(map(repr, left))} with one batch of a step and not "
                "with the last one; with accumulate= it takes the same steps with every batch"
            )
        self.losses = {name: value for name, value in found.items() if name}
        return sum(found.values())

    def _stepped(self, name: str) -> None:
        """The function steps this optimizer."""
        groups = self.optimizers[name].param_groups
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        key = name, self._calls[name]
        self._calls[name] += 1
        if not self._is_last or key in self._put_by or self._weight != 1.0:
            total = _weighed(parameters, self._weight, self._put_by.pop(key, None))
            if not self._is_last:
                self._put_by[key] = total
                return
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.grad = gradient
        if self.prepare(parameters):
            with trace.span("optimizer", trace.OPTIMIZER), self.stepping():
                self._steps[name]()


@torch.no_grad()
def _weighed(
    parameters: list[nn.Parameter], weight: float, before: list[torch.Tensor | None] | None
) -> list[torch.Tensor | None]:
    """Their gradients times `weight`, beside what was put by."""
    found: list[torch.Tensor | None] = []
    for number, parameter in enumerate(parameters):
        gradient, old = parameter.grad, before[number] if before is not None else None
        new = None if gradient is None else gradient * weight
        found.append(new if old is None else old if new is None else old + new)
    return found


def _read_losses(returned: object) -> dict[str, float]:
    """The losses to report, by name; one alone has none."""
    named: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {"": returned}
    losses = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            raise UsageError(
                "Job: the step function must return the loss to report, one number, or losses by name, got "
                f"{type(value).__name__}{f' for {name!r}' if name else ''}"
            )
        losses[name] = float(value)
    return losses
