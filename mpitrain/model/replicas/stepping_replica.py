"""Replicas of workers whose job has a step function with several optimizers: the worker's own, or the servers'.

Invariants: what is pushed of a worker's own steps is by how much all its optimizers have moved the parameters together;
a step in which a gradient is not finite moves nothing, and every gradient is the worker's own, shaped as that of one
optimizer is. Where servers step, each step within a batch is a push of its own, of the gradient of that optimizer's
parameters, and the function goes on when the answer has come.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.data.read.batch import to_device
from mpitrain.errors import UsageError
from mpitrain.model.gradient.step_function import StepFunction
from mpitrain.model.optimizers.group_options import ChangedOptions
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.optimizers.step_hooks import StepHooks
from mpitrain.model.replicas.suspended_step import SuspendedStep
from mpitrain.model.replicas.worker_replica import Gradient, Replica
from mpitrain.model.wire.flat import all_finite


class SteppingReplica(Replica):
    """One worker's model and data; the arguments are those of `Replica`, with local steps."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        assert self.local is not None, "or the strategy is refused"
        rule, optimizers = self.own_gradients.rule, self.local.optimizer
        assert rule.step is not None and isinstance(optimizers, SeveralOptimizers)
        self.turns = StepFunction(rule.step, rule.precision, optimizers, self._prepare, self.model.stepping)
        self._num_prepared, self._is_good = 0, True

    def gradient(self, lease: Any, step: int) -> Gradient:
        """The step function over the lease's batches, from the parameters loaded last; what it gives is a step."""
        self._enter()
        assert self.local is not None
        self._num_prepared, self._is_good = 0, True
        parts = ((to_device(batch, self.model.device), count) for batch, count in self.reader.read(lease))
        self.model.module.zero_grad(set_to_none=True)
        values: list[float] = []

        def go() -> bool:
            seed = functools.partial(self.own_gradients.seed, step)
            values.append(self.turns.run(self.model.module, parts, lease.num_samples, seed))
            return self._is_good

        finite = self.local.move(go)
        self._finite = self._finite and finite
        self._leave()
        return Gradient(values[0], lease.num_samples, finite, lease.num_samples)

    def _prepare(self, parameters: list[nn.Parameter]) -> bool:
        gradients = [one.grad for one in parameters if one.grad is not None]
        self._is_good = self._is_good and all_finite(gradients)
        if self._is_good:
            self.own_gradients.shape(gradients, self._num_prepared)
        self._num_prepared += 1
        return self._is_good


class ServedStepsReplica(Replica):
    """One worker's model and data; the arguments are those of `Replica`, and

    Args:
        optimizer: the job's, which servers step; here it names whose parameters are whose.
    """

    def __init__(self, *args: Any, optimizer: Optimizer, **options: Any):
        super().__init__(*args, **options)
        rule = self.own_gradients.rule
        assert rule.step is not None and isinstance(optimizer, SeveralOptimizers)
        self.server_steps = None  # whose options say which optimizer is to step
        self.turns = StepFunction(rule.step, rule.precision, optimizer, self._prepare)
        self._names = {id(one): name for name, own in self.turns.optimizers.items() for one in _of(own)}
        self._options = ChangedOptions(optimizer)
        for name, own in self.turns.optimizers.items():
            if StepHooks(own, ()):
                raise UsageError(
                    f'Job: the optimizer {name!r} has step hooks, and servers take its steps: use optimizer="worker", '
                    "under which they are taken on the worker"
                )
        self._running: SuspendedStep | None = None
        self._next: tuple[str, Any] = ("", None)

    def gradient(self, lease: Any, step: int) -> Gradient:
        """That of the next step of the batch, which has begun or begins now. Whether one is the last is known when the
        function has gone on from it, so a batch ends with a step in which no optimizer moves."""
        self._enter()
        if self._running is None:
            self._begin(lease, step)
        assert self._running is not None
        how, said = self._running.advance()
        if how == "waits":
            gradient = self._pushed(*said)
        else:
            self._running = None
            gradient = self._pushed("", [], said, lease.num_samples)
        self._leave()
        return gradient._replace(share=float(lease.num_samples), goes_on=how == "waits")

    def _begin(self, lease: Any, step: int) -> None:
        parts = [(to_device(batch, self.model.device), count) for batch, count in self.reader.read(lease)]
        module, own = self.model.module, self.own_gradients
        module.zero_grad(set_to_none=True)

        def seed(part: int) -> None:
            running.ask(lambda: own.seed(step, part))

        running = SuspendedStep(lambda: self.turns.run(module, parts, lease.num_samples, seed), module)
        self._running = running

    def finish(self) -> None:
        """A batch that is under way does not go on."""
        if self._running is not None:
            self._running.break_off()
            self._running = None

    def _prepare(self, parameters: list[nn.Parameter]) -> bool:
        assert self._running is not None
        self._running.wait((self._names[id(parameters[0])], parameters))
        return False  # the servers have stepped

    def _pushed(
        self, name: str, parameters: list[nn.Parameter], loss: float = 0.0, samples: int = 0
    ) -> Gradient:
        """The gradient of these parameters alone, to be pushed."""
        if self._options.text():
            self.finish()
            raise UsageError(
                "Job: the step function changes options of an optimizer whose steps servers take: use schedule= or "
                'scheduler=, or optimizer="worker"'
            )
        kept = {id(one) for one in parameters}
        others = [(one, one.grad) for one in self.model.parameters if id(one) not in kept]
        for one, _ in others:
            one.grad = None
        for wire_buffer in self._wire_buffers or ():
            wire_buffer.release()
        self._wire_buffers = self.model.push_buffers()
        finite = self._finite = self.model.gather_gradients(self._wire_buffers) and loss - loss == 0.0
        for one, gradient in others:
            one.grad = gradient
        return Gradient(loss, samples, finite, 0.0, name)


def _of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]
