"""What an aggregator does with gradients: it receives them as they come, and adds them up.

Invariants: gradients are added in the order in which they are handed in, into the first one; what is received is kept
as bytes, as long as its sender says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.model.wire.buffers import PAD_BYTES, BufferPool, FixedBuffer, VariableBuffer


class NodeSums:
    """Sums of gradients of one node.

    Args:
        dtype: of their numbers.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    @torch.no_grad()
    def add(self, total: FixedBuffer | VariableBuffer, others: Sequence[tuple[float, object]]) -> None:
        """Add `factor * gradient` of each of the others, which are released, to `total`."""
        numbers = self._numbers(total)
        for factor, gradient in others:
            assert isinstance(gradient, FixedBuffer | VariableBuffer)
            numbers.add_(self._numbers(gradient), alpha=factor)
            gradient.release()

    def _numbers(self, buffer: FixedBuffer | VariableBuffer) -> torch.Tensor:
        """All numbers, and the zeros that fill the buffer up."""
        return buffer.raw[PAD_BYTES:-PAD_BYTES].view(self.dtype)


class ByteBuffers:
    """Buffers for whatever comes, reused by their length."""

    def __init__(self) -> None:
        self._pools: dict[int, BufferPool] = {}

    def take(self, num_bytes: int) -> FixedBuffer:
        """One of so many bytes between its pads."""
        if num_bytes not in self._pools:
            self._pools[num_bytes] = BufferPool(num_bytes, torch.uint8)
        return self._pools[num_bytes].take()

    def empty(self) -> VariableBuffer:
        """For a message whose length is known when it arrives."""
        return VariableBuffer(take=self.take)

    @property
    def num_buffers(self) -> int:
        """How many were ever needed."""
        return sum(pool.num_frames for pool in self._pools.values())
