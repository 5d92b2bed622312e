"""A worker's copy of a model over two routes: rows of tables from servers, dense parameters of its own.

Invariants: a push carries rows alone. Once it is answered the worker brings its dense gradient to an all-reduce, and
steps; so whatever is computed or measured next is computed on dense parameters and rows of one version.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from mpitrain.effects import Exchange
from mpitrain.model.replicas.reduced_parameters import ReducedParameters
from mpitrain.model.replicas.tabled_replica import TabledReplica
from mpitrain.model.replicas.worker_replica import Gradient
from mpitrain.model.wire.flat import all_finite


class HybridReplica(TabledReplica):
    """One worker's model and data; the arguments are those of `TabledReplica`, and

    Args:
        reduced: the dense parameters, which virtual workers share.
    """

    def __init__(self, *args: Any, reduced: ReducedParameters, **options: Any):
        super().__init__(*args, **options)
        self.reduced, self._vector = reduced, reduced.vector()
        self._num_rounds = self._samples = self._samples_before = 0

    def progress(self, samples: int, living: float = 1.0) -> None:
        """So many samples have been accepted. (A lost worker ends the run.)"""
        super().progress(samples, living)
        self._samples = samples

    def hear_figures(self, text: str) -> None:
        """Validations have given figures, which the rates of dense parameters follow."""
        super().hear_figures(text)
        self.reduced.updates.pace.hear_figures(text)

    def _may_step(self, loss: float) -> bool:
        return False  # the optimizer steps here, and runs its hooks itself

    def collect(self, loss: float, num_samples: int, share: float | None = None) -> Gradient:
        """As any replica's, with the dense gradient put by for the all-reduce."""
        gradient = super().collect(loss, num_samples, share)
        dense = [one.grad for one in self.model.reduced if one.grad is not None]
        self._finite = gradient.finite and all_finite(dense)
        self.reduced.gather(self._vector, gradient.share)
        self._samples_before = self._samples
        return gradient._replace(finite=self._finite)

    def reduction(self, is_finite: bool) -> Exchange:
        """What this worker brings to the all-reduce, and the step after it."""
        if not is_finite:
            self._vector.zero_()  # its share, too
        return Exchange(self._rounds, lambda: float(self._vector.numel() * self._vector.element_size()))

    def _rounds(self) -> Generator[torch.Tensor, torch.Tensor, None]:
        total = yield self._vector
        self.reduced.step(total, self._num_rounds, self._samples_before)
        self._num_rounds += 1

    def state(self) -> dict[str, Any]:
        """As any replica's, and the dense parameters, which are those of all workers."""
        return super().state() | {"reduced": self.reduced.state()}

    def restore_reduced(self, state: dict[str, Any]) -> None:
        """Continue with the dense parameters of what any worker's `state` returned."""
        self.reduced.restore(state["reduced"])
