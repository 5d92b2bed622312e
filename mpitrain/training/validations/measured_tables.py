"""What workers measure on a validation set of a model with tables: the rows come from the servers.

Invariants: dense parameters are those of the version that is measured; rows are as they are when a unit of the set is
measured, on whichever worker that is. Under `sync()` the two are of one version, for no update is made without the
worker that validates.
"""

from __future__ import annotations

import functools
from typing import Any

from mpitrain.data.read.batch import Batch
from mpitrain.embedding.lookups import HeldRows, Ids, RowsMissing, union
from mpitrain.embedding.sections import split
from mpitrain.messages import Payload
from mpitrain.model.replicas.tabled_replica import TabledReplica
from mpitrain.model.wire.buffers import VariableBuffer
from mpitrain.training.validations.measured_elsewhere import MeasuredByWorkers
from mpitrain.training.validations.validation import Measure, losses_of


class MeasuredWithTables(MeasuredByWorkers):
    """As `MeasuredByWorkers`."""

    def __init__(self, replica: TabledReplica, measure: Measure, num_workers: int):
        super().__init__(replica, measure, num_workers)
        self.lookups = replica.lookups
        self._rows = HeldRows(self.lookups, replica.model.layout.dtype, wants_gradient=False)
        self._needed: tuple[int, Ids] | None = None  # of the unit that is measured next

    def missing(self, unit: int, snapshot: Payload | None = None) -> dict[int, Payload]:
        """For each shard a question for the rows that the unit needs and are not here."""
        if self._needed is None or self._needed[0] != unit:
            self._rows.drop()
            self._needed = unit, self._name(*self.measure.bounds(unit, self.num_units))
        missing = self._rows.missing(self._needed[1])
        return {shard: VariableBuffer(message) for shard, message in self._rows.asking(missing).items()}

    def _name(self, first: int, end: int) -> Ids:
        """The rows that some batches look up."""
        module, found = self.replica.take_module(), list[Ids]()
        was_training = module.training
        module.eval()
        self._enter()
        for batch in self.measure.batches(first, end):
            found.append(self._rows.name(functools.partial(self._losses, batch)))
        module.train(was_training)
        return union(found)

    def _losses(self, batch: Batch) -> Any:
        return losses_of(self.measure.job, self.measure.metrics, self.measure.module, batch)

    def hold(self, shard: int, payload: Any) -> None:
        """Take the rows that were asked for; the payload is released."""
        sections = split(payload.body, self.lookups.sizes(shard), self.lookups.widths)
        payload.release()
        self._rows.take(shard, sections, anew=False)

    def unit(self, unit: int, snapshot: Payload | None = None) -> VariableBuffer | None:  # type: ignore[override]
        """As without tables; None where rows are missing."""
        try:
            result = super().unit(unit, snapshot)
        except RowsMissing:
            assert self._needed is not None, "a unit whose rows nobody has asked for"
            self._needed = unit, union([self._needed[1], self._rows.take_named()])
            return None
        self._needed = None
        return result

    def _enter(self) -> None:
        super()._enter()
        self.lookups.present = self._rows


def measured_by_workers(replica: Any, measure: Measure, num_workers: int) -> MeasuredByWorkers:
    """What a worker measures with."""
    kind = MeasuredWithTables if isinstance(replica, TabledReplica) else MeasuredByWorkers
    return kind(replica, measure, num_workers)
