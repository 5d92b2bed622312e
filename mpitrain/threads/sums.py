"""Sums of tensors between threads: an all-reduce by nobody but ourselves.

Invariants: every rank adds up a part of its own, in the order of ranks, so the bits depend on what was brought alone,
and all ranks hold the same. Numbers of 16 bits are added in 32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mpitrain.devices import accelerator
from mpitrain.threads.hub import Meeting


class Sums:
    """The sums of one rank, which is number `place` in `meeting`; `waiting`: is held while it waits for others."""

    def __init__(
        self, meeting: Meeting, rank: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ):
        self.meeting, self.rank, self.waiting = meeting, rank, waiting
        self.size, self.place = len(meeting.ranks), meeting.ranks.index(rank)

    @torch.no_grad()
    def add_up(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum of the 1-D tensors that all ranks bring, of one length and dtype; a new tensor of at least 32 bits.
        Nobody changes what it has brought until it has the sum."""
        wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        _settle(wide)
        own = slice(*self._bounds(flat.numel()))
        everybody = self._meet(wide)
        total = torch.empty_like(wide[own])
        for number, other in enumerate(everybody):
            part = other[own].to(wide.device)
            total = total.copy_(part) if number == 0 else total.add_(part)
        _settle(total)
        parts = self._meet(total)
        result = torch.cat([part.to(wide.device) for part in parts])
        _settle(result)
        self._meet()  # the parts were read
        return result

    def _meet(self, brought: object = None) -> list[Any]:
        with self.waiting():
            return list(self.meeting.meet(self.rank, brought))

    def _bounds(self, numel: int) -> tuple[int, int]:
        return numel * self.place // self.size, numel * (self.place + 1) // self.size

    @torch.no_grad()
    def first_of(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """All take over the values that number `root` holds."""
        for tensor in tensors:
            _settle(tensor)
        everybody = self._meet(tensors)
        if self.place != root:
            for tensor, value in zip(tensors, everybody[root], strict=True):
                tensor.copy_(value)
                _settle(tensor)
        self._meet()  # the values were read

    def bring(self, value: object) -> list[Any]:
        """What all ranks bring, in the order of ranks; nobody changes it afterwards."""
        return self._meet(value)


class WorkersSum:
    """The sums that some ranks take together, one after the other, as `mpi/workers_sum.py` takes them."""

    def __init__(self, sums: Sums):
        self._sums = sums

    def begin(self, vector: torch.Tensor) -> Any:
        """The sum over all ranks, in place of a 1-D vector; what is returned does it, and returns the vector."""
        return lambda: self(vector)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.copy_(self._sums.add_up(vector))

    def close(self) -> None:
        """Nothing is held."""


def _settle(tensor: torch.Tensor) -> None:
    """Another thread may read what this one has computed."""
    accelerator.wait_for_stream(tensor.device)
