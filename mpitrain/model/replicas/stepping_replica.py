"""A worker's replica whose job has a step function with several optimizers, which are its own.

Invariants: what is pushed of a step is by how much all its optimizers have moved the parameters together. A step in
which a gradient is not finite moves nothing. Every gradient is this worker's own, shaped as that of one optimizer is.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from mpitrain.data.read.batch import to_device
from mpitrain.model.gradient.step_function import StepFunction
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.model.replicas.worker_replica import Gradient, Replica
from mpitrain.model.wire.flat import all_finite


class SteppingReplica(Replica):
    """One worker's model and data; the arguments are those of `Replica`, with local steps."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        assert self.local is not None, "or the strategy is refused"
        rule, optimizers = self.own_gradients.rule, self.local.optimizer
        assert rule.step is not None and isinstance(optimizers, SeveralOptimizers)
        self.turns = StepFunction(rule.step, rule.precision, optimizers, self._prepare)
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
