"""A worker's copy of a model with tables: dense parameters as in any replica, and the rows of its present batch.

Invariants: batches that were read to learn which rows they need are not read again. A batch that comes upon rows which
nobody had named changes nothing: buffers are put back, and it is computed anew with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpitrain.data.read.batch import Batch, to_device
from mpitrain.embedding.lookups import HeldRows, Ids, Lookups, RowsMissing, union
from mpitrain.embedding.sections import Section, What, join, split
from mpitrain.errors import UsageError
from mpitrain.messages import Lease, Payload
from mpitrain.model.gradient.accumulation import LeaseReader, Part
from mpitrain.model.replicas.worker_replica import Gradient, Replica
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer, wire_dtype
from mpitrain.model.wire.flat import all_finite

MOST_TRIES = 16  # passes over one batch that each want other rows than the one before
CHUNK_ROWS = 1 << 16  # of the final model, in one question


class _KeptLeases:
    """What `LeaseReader` reads, kept until it is dropped."""

    def __init__(self, reader: LeaseReader):
        self._reader = reader
        self._kept: dict[Lease, list[Part]] = {}

    def announce(self, lease: Lease) -> None:
        """As `LeaseReader`'s."""
        self._reader.announce(lease)

    def read(self, lease: Lease) -> Iterator[Part]:
        """As `LeaseReader`'s."""
        if lease not in self._kept:
            self._kept[lease] = list(self._reader.read(lease))
        return iter(self._kept[lease])

    def drop(self, lease: Lease) -> None:
        """Keep it no longer."""
        self._kept.pop(lease, None)


class _Numbers:
    """Dense numbers in somebody else's buffer."""

    def __init__(self, body: torch.Tensor):
        self.body = body

    def release(self) -> None:
        """Nothing is given back: the buffer goes with its last view."""


class TabledReplica(Replica):
    """One worker's model and data, with tables; the arguments are those of `Replica`, and

    Args:
        push_wire: as in `ServerStrategy`: what gradients of rows are rounded to.
    """

    def __init__(self, *args: Any, push_wire: str = "full", **options: Any):
        super().__init__(*args, **options)
        lookups = self.model.lookups
        assert lookups is not None, "a model without tables"
        self.lookups: Lookups = lookups
        self.rows = HeldRows(lookups, wire_dtype(push_wire, self.model.layout.dtype))
        self.kept = _KeptLeases(self.reader)
        self.reader: Any = self.kept
        self._needed: dict[Lease, Ids] = {}
        self._num_tries = 0
        self._chunks: Iterator[Ids] | None = None  # of the final model, still to be asked for

    def _sections(self, shard: int, payload: Any) -> list[Section]:
        sections = split(payload.body, self.lookups.sizes(shard), self.lookups.widths)
        payload.release()
        return sections

    def load(self, shard: int, payload: object) -> None:
        """Take over one shard's parameters, and the rows that came with them in place of those of this shard."""
        if isinstance(payload, FixedBuffer):  # of the final model
            super().load(shard, payload)
            return
        sections = self._sections(shard, payload)
        what, _, _, values = sections[0]
        assert values is not None
        super().load(shard, VariableBuffer(values) if what == What.CODED else _Numbers(values))
        self.rows.take(shard, sections[1:], anew=True)

    def hold(self, shard: int, payload: object) -> None:
        """Take the rows that were asked for; the payload is released."""
        self.rows.take(shard, self._sections(shard, payload), anew=False)

    def _enter(self) -> None:
        super()._enter()
        self.lookups.present = self.rows

    def missing(self, lease: Any, step: int) -> dict[int, Payload]:
        """For each shard a question for the rows that this batch needs and are not here."""
        if lease not in self._needed:
            self._needed[lease] = self._name(lease, step)
        missing = self.rows.missing(self._needed[lease])
        return {shard: VariableBuffer(message) for shard, message in self.rows.asking(missing).items()}

    def look_ahead(self, lease: Any, step: int) -> None:
        """The answer to the push that is taken next is to bring the rows of this batch; None: of none."""
        if lease is not None and lease not in self._needed:
            self._needed[lease] = self._name(lease, step)
        self.rows.wanted = None if lease is None else self._needed[lease]

    def _name(self, lease: Lease, step: int) -> Ids:
        """The rows that a batch looks up, as far as a pass with what is here says so."""
        self._enter()
        model = self.model
        kept = [buffer.clone() for buffer in model.module.buffers()]
        model.module.train()
        found: list[Ids] = []
        for number, (batch, _) in enumerate(self.kept.read(lease)):
            self.own_gradients.seed(step, number)
            on_device = to_device(batch, model.device)
            found.append(self.rows.name(self._pass_over(on_device)))
        self._put_back(kept)
        self._leave()
        return union(found)

    def _pass_over(self, batch: Batch) -> Callable[[], Any]:
        return lambda: self.own_gradients.rule.loss(self.model.module, batch)

    @torch.no_grad()
    def _put_back(self, kept: list[torch.Tensor]) -> None:
        buffers = list(self.model.module.buffers())
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)

    def gradient(self, lease: Any, step: int) -> Gradient | None:  # type: ignore[override]
        """As any replica's; None, and nothing has changed, where rows are missing."""
        self._enter()
        kept = [buffer.clone() for buffer in self.model.module.buffers()]
        self.rows.begin_step()
        try:
            gradient = super().gradient(lease, step)
        except RowsMissing:
            self._put_back(kept)
            self._num_tries += 1
            if self._num_tries > MOST_TRIES:
                worker = self.own_gradients.worker
                raise UsageError(
                    f"worker {worker}, step {step}: {MOST_TRIES} forward passes over one batch have each "
                    "looked up other rows; what is looked up must depend on the batch, the parameters and torch's own "
                    "random numbers alone"
                ) from None
            self._needed[lease] = union([self._needed[lease], self.rows.take_named()])
            return None
        self._num_tries = 0
        self._needed.pop(lease, None)
        self.kept.drop(lease)
        return gradient

    def collect(self, loss: float, num_samples: int, share: float | None = None) -> Gradient:
        """As any replica's; gradients of rows count among what has to be finite."""
        gradient = super().collect(loss, num_samples, share)
        self._finite = gradient.finite and all_finite(self.rows.gradients())
        return gradient._replace(finite=self._finite)

    def take_push(self) -> list[VariableBuffer]:
        """What to push, one message a shard."""
        messages = []
        taken: list[Any] = list(super().take_push())
        for shard, (dense, more) in enumerate(zip(taken, self.rows.pushed(), strict=True)):
            what = What.CODED if isinstance(dense, VariableBuffer) else What.DENSE
            sizes = self.lookups.sizes(shard)
            messages.append(VariableBuffer(join([Section(what, values=dense.body), *more], sizes)))
            dense.release()
        return messages

    # the final model

    def missing_of_model(self) -> dict[int, Payload]:
        """For each shard a question for the next rows of layers that hold their own weight; none once all are here."""
        if self._chunks is None:
            self._chunks = iter(self.lookups.own_rows(CHUNK_ROWS))
        ids = next(self._chunks, None)
        if ids is None:
            self._chunks = None
            return {}
        return {shard: VariableBuffer(message) for shard, message in self.rows.asking(ids).items()}

    @torch.no_grad()
    def hold_model(self, shard: int, payload: object) -> None:
        """Take rows of the final model into the weights of their layers."""
        for section in self._sections(shard, payload):
            assert section.slots is not None and section.values is not None
            ids = torch.from_numpy(self.lookups.partitions[section.table].ids(shard, section.slots))
            weight = self.lookups.tables[section.table].parameter
            weight[ids.to(weight.device)] = section.values.to(weight)
