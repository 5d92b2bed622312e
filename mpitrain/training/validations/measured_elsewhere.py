"""What ranks that hold different parameters measure of one another's.

Invariants: what is measured, the parameters and running statistics of the rank that validates and the moving average,
travels as its bytes in one message, so every rank measures the same bits. A rank that has measured for another one goes
on with its own parameters and buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mpitrain.messages import Payload
from mpitrain.model import Replica
from mpitrain.model.optimizers.ema import Averaged
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.training.agree import attempt
from mpitrain.training.validations.validation import Measure, Part
from mpitrain.training.validations.validation_parts import from_bytes, gather_parts, to_bytes

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks

UNITS_A_WORKER = 4  # so that one which comes late, or is slow, leaves more to the others
MOST_BYTES = (
    1 << 30
)  # of what is measured, in one message; larger models the validating worker measures alone


class MeasuredByWorkers:
    """The validation set of one worker over parameter servers, in units.

    Args:
        replica: the worker's; measure: of its module; num_workers: that share the set.
    """

    def __init__(self, replica: Replica | PeerReplica, measure: Measure, num_workers: int):
        self.replica, self.measure = replica, measure
        job = measure.job
        self.averages = job.ema is not None and job.validate_ema
        held, averaged = self._tensors(), replica.model.parameters if self.averages else []
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in [*held, *averaged]]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in [*held, *averaged])
        most = UNITS_A_WORKER * num_workers if num_bytes <= MOST_BYTES else 1
        self.num_units = min(measure.num_batches, most)
        self._average: list[torch.Tensor] = []

    def _tensors(self) -> list[torch.Tensor]:
        """All that training changes."""
        model = self.replica.model
        buffers = list(model.module.buffers())
        return [*model.parameters, *model.reduced, *buffers]

    def begin(self, averages: dict[int, Payload]) -> None:
        """A validation begins; `averages`: of each shard."""
        self._average = []
        if not self.averages:
            return
        parts = []
        for _, payload in sorted(averages.items()):
            assert isinstance(payload, FixedBuffer)
            parts.append(payload.body.clone())
            payload.release()
        self._average = self._shaped(torch.cat(parts))

    def _shaped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parameters = self.replica.model.parameters
        parts = flat.split([parameter.numel() for parameter in parameters])
        pairs = zip(parts, parameters, strict=True)
        return [part.view(parameter.shape).to(parameter.dtype) for part, parameter in pairs]

    def snapshot(self) -> VariableBuffer:
        """What this worker holds, and the average."""
        self.replica.take_module()
        tensors = [*self._tensors(), *self._average]
        return VariableBuffer(torch.cat([_bytes_of(tensor) for tensor in tensors]))

    def unit(self, unit: int, snapshot: Payload | None = None) -> VariableBuffer:
        """What a unit gives, of what this worker holds or of a snapshot."""
        return packed(self._part(*self.measure.bounds(unit, self.num_units), snapshot))

    def _part(self, first: int, end: int, snapshot: Payload | None) -> Part:
        self._enter()
        if snapshot is None:
            return self.measure.part(first, end, self._averaged(self._average))
        assert isinstance(snapshot, VariableBuffer)
        held, values = self._tensors(), self._read(snapshot.body)
        with _pointing(held, values[: len(held)]):
            return self.measure.part(first, end, self._averaged(values[len(held) :]))

    def _enter(self) -> None:
        """Make the module hold what this worker holds."""
        self.replica.take_module()

    def conclude(self, results: list[Payload], samples: int | None) -> dict[str, float]:
        """The figures of all units."""
        return self._concluded(unpacked(results), samples)

    def _concluded(self, rows: Part, samples: int | None) -> dict[str, float]:
        self.replica.take_module()
        return self.measure.conclude(rows, samples, self._averaged(self._average))

    def _read(self, body: torch.Tensor) -> list[torch.Tensor]:
        at, found = 0, []
        for shape, dtype in self._shapes:
            num_bytes = shape.numel() * dtype.itemsize
            found.append(body[at : at + num_bytes].clone().view(dtype).view(shape))
            at += num_bytes
        return found

    def _averaged(self, average: list[torch.Tensor]) -> Averaged | None:
        """What lets the module hold the average for a while."""
        if not self.averages:
            return None
        return lambda: _pointing(self.replica.model.parameters, average)


class MeasuredByPeers(MeasuredByWorkers):
    """The validation set of one peer: what the first one holds is measured, by itself or by all."""

    def alone(self, samples: int | None) -> dict[str, float]:
        """Measure what this peer holds."""
        self.take_average()
        return self._concluded(self._part(0, self.measure.num_batches, None), samples)

    def take_average(self) -> None:
        """A validation begins: the average is as it is now."""
        ema = self.replica.updates.ema if isinstance(self.replica, PeerReplica) else None
        if self.averages and ema is not None:
            self._average = self._shaped(ema.values()[0].clone())

    def show(self) -> VariableBuffer:
        """What the first peer holds, for all."""
        self.take_average()
        return self.snapshot()

    def part_of(self, rank: int, size: int) -> float:
        """How much of the set one of `size` peers measures, of 1."""
        return self.measure.part_of(rank, size)

    def share(self, rank: int, size: int, shown: Payload) -> VariableBuffer:
        """What one of `size` peers measures of it."""
        return packed(self._part(*self.measure.bounds(rank, size), shown))

    def join(self, results: list[Payload]) -> VariableBuffer:
        """The results of several peers as one."""
        return packed(unpacked(results))

    def measure_together(self, runtime: Ranks, samples: int | None) -> dict[str, float]:
        """Collective: all ranks measure what the first one holds, which gets the figures."""
        num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in self._shapes)
        body = torch.empty(num_bytes, dtype=torch.uint8)
        if runtime.rank == 0:
            body.copy_(self.show().body)
        if runtime.size > 1:
            runtime.broadcast_tensors([body])
        shown = VariableBuffer(body)
        part = attempt(runtime, lambda: unpacked([self.share(runtime.rank, runtime.size, shown)]))
        rows = gather_parts(runtime, part)
        return attempt(runtime, lambda: self._concluded(rows, samples) if runtime.rank == 0 else {})


def packed(rows: Part) -> VariableBuffer:
    """Results as a message."""
    return VariableBuffer(torch.frombuffer(bytearray(to_bytes(rows)), dtype=torch.uint8))


def unpacked(results: list[Payload]) -> Part:
    """What messages hold, which are released."""
    rows: Part = []
    for result in results:
        assert isinstance(result, VariableBuffer)
        rows += from_bytes(result.body.numpy().tobytes())
        result.release()
    return rows


@contextlib.contextmanager
def _pointing(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """For as long as the context lasts `tensors` have the memory of `values`: into their own an answer of a server may
    be arriving."""
    own = [tensor.data for tensor in tensors]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value.to(tensor.device)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
