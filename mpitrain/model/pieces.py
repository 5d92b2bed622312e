"""Tensors in pieces of some megabytes: what is done with all of them passes through the caches piece by piece, and what
it makes meanwhile is no larger than a piece.

Invariants: the pieces follow from shapes, types and layouts alone, so ranks that hold the same model cut alike. Only a
contiguous tensor is cut; every other one, and every small one, lies in a piece as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

PIECE_BYTES = 4 << 20


class _Slice(NamedTuple):
    """Elements `start` to `end` of the tensor of that number; `is_whole`: these are all."""

    tensor: int
    start: int
    end: int
    is_whole: bool


class Piece(NamedTuple):
    """One piece of a list of tensors, and of every other list of tensors of the same shapes."""

    slices: list[_Slice]

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views, each of a tensor or, flat, of a slice of one."""
        return [
            tensors[one.tensor] if one.is_whole else tensors[one.tensor].view(-1)[one.start : one.end]
            for one in self.slices
        ]

    def pick(self, values: Sequence[float]) -> list[float]:
        """For each of those views its tensor's value."""
        return [values[one.tensor] for one in self.slices]


def cut(tensors: Sequence[torch.Tensor], piece_bytes: int) -> list[Piece]:
    """All tensors in their order, in pieces of at most so many bytes where they can be cut."""
    pieces, left_bytes = list[Piece](), 0
    for number, tensor in enumerate(tensors):
        for one in _slices(number, tensor, piece_bytes):
            num_bytes = (one.end - one.start) * tensor.itemsize
            if not pieces or num_bytes > left_bytes:
                pieces.append(Piece([]))
                left_bytes = piece_bytes
            pieces[-1].slices.append(one)
            left_bytes -= num_bytes
    return pieces


def _slices(number: int, tensor: torch.Tensor, piece_bytes: int) -> list[_Slice]:
    numel = tensor.numel()
    if tensor.nbytes <= piece_bytes or not tensor.is_contiguous():
        return [_Slice(number, 0, numel, is_whole=True)]
    length = max(1, piece_bytes // tensor.itemsize)
    return [
        _Slice(number, start, min(start + length, numel), is_whole=False) for start in range(0, numel, length)
    ]
