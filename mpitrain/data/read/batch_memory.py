"""Reusing the memory of batches.

A batch belongs to the caller for as long as any tensor, view or numpy array of it lives; then its memory serves the
next batch, so that a loop touches the same few pages all the time instead of fresh ones for every batch. With a
CUDA device batches are pinned and come from torch's own pinned pool, which does the same and knows besides when a
copy to the device that is under way has ended.

Invariants: memory is reused only after its last user has dropped it, and at most `NUM_SPARE` batches are kept
unused.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import ArraySpec

SMALL_BYTES = 64 << 10  # below it a fresh array costs less than keeping one
NUM_SPARE = 4  # two in the caller's hands (the old while it takes the new), two ready

Buffer = tuple[torch.Tensor, NDArray[np.generic]]  # one memory, seen from both sides


class BatchBuffers:
    """Makes batches of given arrays; `largest_bytes` is the largest one so far."""

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        self._dtypes = {name: np.dtype(spec.dtype) for name, spec in self._specs.items()}
        self._pinned = torch.cuda.is_available()
        self._spare: dict[str, deque[NDArray[np.uint8]]] = {name: deque(maxlen=NUM_SPARE) for name in specs}
        self.largest_bytes = 0

    def take(self, num_samples: int) -> dict[str, Buffer]:
        """Uninitialised memory for a batch: name -> (tensor, array) of shape (num_samples, ...)."""
        self.largest_bytes = max(
            self.largest_bytes, num_samples * sum(spec.sample_bytes for spec in self._specs.values())
        )
        return {name: self._one(name, (num_samples, *spec.shape)) for name, spec in self._specs.items()}

    def _one(self, name: str, shape: tuple[int, ...]) -> Buffer:
        dtype = self._dtypes[name]
        if self._pinned:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)
            return tensor, tensor.numpy()
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            array = np.empty(shape, dtype)
            return torch.from_numpy(array), array
        memory = self._spare_memory(name, num_bytes)
        # tensors keep this view alive, and only they: its end is the end of the batch
        array = memory[:num_bytes].view(dtype).reshape(shape)
        weakref.finalize(array, self._spare[name].append, memory).atexit = False
        return torch.from_numpy(array), array

    def _spare_memory(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        try:
            memory = self._spare[name].pop()  # the last one used is the warmest
        except IndexError:
            memory = np.empty(0, np.uint8)
        return memory if len(memory) >= num_bytes else np.empty(num_bytes, np.uint8)

    def close(self) -> None:
        """Give idle memory back; batches in use stay valid."""
        self._spare = {name: deque(maxlen=0) for name in self._spare}
