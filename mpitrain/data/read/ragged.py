"""Batches with variable arrays: what a consumer gets, and how it is put together from chunks.

A variable array `x` of a batch of B samples is two tensors: `x`, the entries of all samples one after the other,
and `x_offsets`, int64 of length B + 1: sample i has the entries x[x_offsets[i] : x_offsets[i + 1]]. Nothing is
padded and nothing lost; `torch.nested.nested_tensor_from_jagged(x, x_offsets)` makes a nested tensor of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import OFFSETS, ArraySpec, Catalogue
from mpitrain.data.read.order import IntArray
from mpitrain.data.read.prefetch import pins

Batch = dict[str, torch.Tensor]
Entries = NDArray[np.generic]


def fixed_arrays(catalogue: Catalogue) -> dict[str, ArraySpec]:
    """What has one row a sample: the arrays of one shape, and of a variable one where its samples begin and end."""
    return {
        name + OFFSETS if spec.variable else name: ArraySpec((2,), "int64") if spec.variable else spec
        for name, spec in catalogue.arrays.items()
    }


class EntryPlaces:
    """The entries of each variable array in the chunks that a cache holds: one place of the largest size per chunk."""

    def __init__(self, catalogue: Catalogue, num_places: int):
        self._held: dict[str, Entries] = {
            name: np.empty((num_places, entries, *catalogue.arrays[name].shape), catalogue.arrays[name].dtype)
            for name, entries in catalogue.chunk_entries.items()
        }
        self.largest_bytes = 0  # of all entries of a batch

    def place(self, number: int) -> dict[str, Entries]:
        """Where a chunk's entries go."""
        return {name: held[number] for name, held in self._held.items()}

    def gather(self, places: IntArray, rows: Mapping[str, Entries]) -> Batch:
        """The entries of the samples `rows[name + "_offsets"][i]` = [begin, end) of places[i], and the batch's own
        offsets.
        """
        batch: Batch = {}
        for name, held in self._held.items():
            spans = rows[name + OFFSETS]
            batch |= self._new(name, spans)
            flat, ends = batch[name].numpy(), batch[name + OFFSETS][1:].tolist()
            for place, (begin, end), stop in zip(places.tolist(), spans.tolist(), ends):
                flat[stop - (end - begin) : stop] = held[place, begin:end]
        self._count(batch)
        return batch

    def join(self, pieces: Sequence[tuple[IntArray, Batch]], num_samples: int) -> Batch:
        """One batch of what was gathered apart: (numbers of the samples in the batch, their entries)."""
        batch: Batch = {}
        for name in self._held:
            samples: list[torch.Tensor] = [torch.empty(0)] * num_samples
            for numbers, piece in pieces:
                lengths = piece[name + OFFSETS].diff().tolist()
                for number, entries in zip(numbers.tolist(), piece[name].split(lengths)):
                    samples[number] = entries
            ends = torch.tensor([len(entries) for entries in samples]).cumsum(0)
            batch |= {
                name: torch.cat(samples),
                name + OFFSETS: torch.cat([torch.zeros(1, dtype=ends.dtype), ends]),
            }
        self._count(batch)
        return batch

    def _new(self, name: str, spans: Entries) -> Batch:
        offsets = torch.zeros(len(spans) + 1, dtype=torch.int64)
        np.cumsum(spans[:, 1] - spans[:, 0], out=offsets.numpy()[1:])  # type: ignore[operator]  # int64
        held = self._held[name]
        flat = torch.empty(
            (int(offsets[-1]), *held.shape[2:]),
            dtype=getattr(torch, held.dtype.name),
            pin_memory=pins(),
        )
        return {name: flat, name + OFFSETS: offsets}

    def _count(self, batch: Batch) -> None:
        self.largest_bytes = max(self.largest_bytes, sum(tensor.nbytes for tensor in batch.values()))

    def close(self) -> None:
        """Give the memory back."""
        self._held = {}


def samples_of(batch: Mapping[str, torch.Tensor]) -> Iterator[Batch]:
    """The samples of a batch one by one, views of it: a variable array is the sample's entries."""
    parts = {}
    for name, tensor in batch.items():
        if name + OFFSETS in batch:
            offsets = batch[name + OFFSETS]
            parts[name] = tensor.split(offsets.diff().tolist())
        elif name.removesuffix(OFFSETS) not in batch or not name.endswith(OFFSETS):
            parts[name] = tensor.unbind()
    for sample in zip(*parts.values()):
        yield dict(zip(parts, sample))
