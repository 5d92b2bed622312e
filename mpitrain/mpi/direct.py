"""Reductions of our own over Isend and Irecv: every rank adds one part of everybody's tensor and hands it to all.

The law of this file: each rank sends and receives (n - 1)/n of the tensor once for the reduce-scatter and once for the
allgather, which is the bound; parts are cut into segments, and a segment is added while the next ones travel. The
owner of a part adds the contributions **in rank order**, 16-bit floats in float32, rounded once: the bits depend on
the tensors alone, not on timing, on the number of elements or on where an element lies. (Thakur, Rabenseifner, Gropp,
"Optimization of collective communication operations in MPICH", 2005, section 4, with the exchange all to all.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpitrain.mpi.lines import Task
from mpitrain.mpi.op import Op
from mpitrain.mpi.reduction import Reduction, is_sixteen

if TYPE_CHECKING:
    from mpitrain.mpi.group_core import GroupCore

SCATTER_TAG, GATHER_TAG = 1, 2
SEGMENT_BYTES = 1 << 20
WINDOW = 3  # segments under way at once


def cut(flat: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The flat tensor as `num_parts` contiguous parts whose lengths differ by one at most."""
    short, rest = divmod(flat.numel(), num_parts)
    return list(flat.split([short + (index < rest) for index in range(num_parts)]))


def allreduce(
    group: GroupCore,
    flat: torch.Tensor,
    reduction: Reduction,
    members: Sequence[int] | None = None,
    divide_by: int | None = None,
) -> Task:
    """Reduce `flat` (host, one dimension) in place over `members` (ranks of the group, this one among them)."""
    members = range(group.size()) if members is None else members
    parts = cut(flat, len(members))
    exchange = _Exchange(group, parts, reduction, members)
    for index in range(exchange.num_segments):
        exchange.fill_window(index)
        yield exchange.incoming[index] + exchange.outgoing[index]
        own = exchange.add(index)
        reduction.after(own, group.size() if divide_by is None else divide_by)
        exchange.hand_out(index, own)
    yield exchange.last


def reduce_scatter(
    group: GroupCore, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction
) -> Task:
    """`out` (flat) becomes this rank's part reduced over all; `parts[r]` (flat, any lengths) belongs to rank r."""
    exchange = _Exchange(group, parts, reduction, range(group.size()))
    own = parts[group.rank()]
    for index in range(exchange.num_segments):
        exchange.fill_window(index)
        yield exchange.incoming[index] + exchange.outgoing[index]
        piece = exchange.add(index)
        start = index * exchange.length
        reduction.after(piece, group.size())
        out[start : start + piece.numel()].copy_(piece)
    assert out.numel() == own.numel(), (out.numel(), own.numel())


class _Exchange:
    """The segments of one reduce-scatter among `members`: what has been posted and what has come in."""

    def __init__(
        self, group: GroupCore, parts: Sequence[torch.Tensor], reduction: Reduction, members: Sequence[int]
    ):
        self.group, self.parts, self.reduction, self.members = group, parts, reduction, members
        self.place = members.index(group.rank())
        itemsize = parts[0].element_size()
        self.length = max(1, SEGMENT_BYTES // itemsize)
        self.num_segments = -(-max(part.numel() for part in parts) // self.length)
        self.incoming: list[list[Op]] = []
        self.outgoing: list[list[Op]] = []
        self.last: list[Op] = []
        self._arrived: list[dict[int, torch.Tensor]] = []

    def segment(self, place: int, index: int) -> torch.Tensor:
        """Segment `index` of that member's part; empty where the part is shorter."""
        return self.parts[place][index * self.length : (index + 1) * self.length]

    def others(self) -> list[int]:
        """Places of the other members, starting behind this one, so that not all talk to the same at once."""
        count = len(self.members)
        return [(self.place + step) % count for step in range(1, count)]

    def fill_window(self, index: int) -> None:
        """Post segments up to `index + WINDOW`."""
        while len(self.incoming) < min(index + WINDOW, self.num_segments):
            following = len(self.incoming)
            own = self.segment(self.place, following)
            buffers = {place: torch.empty_like(own) for place in self.others()}
            self._arrived.append(buffers)
            group = self.group
            self.incoming.append(
                [
                    op
                    for place, buffer in buffers.items()
                    for op in group._receive(buffer, self.members[place], SCATTER_TAG)
                ]
            )
            self.outgoing.append(
                [
                    op
                    for place in self.others()
                    for op in group._send(self.segment(place, following), self.members[place], SCATTER_TAG)
                ]
            )

    def add(self, index: int) -> torch.Tensor:
        """This rank's segment, reduced over the members in rank order."""
        own, arrived = self.segment(self.place, index), self._arrived[index]
        pieces = [own if place == self.place else arrived[place] for place in range(len(self.members))]
        wide = is_sixteen(own.dtype)
        total = pieces[0].float() if wide else pieces[0].clone() if self.place == 0 else pieces[0]
        for piece in pieces[1:]:
            self.reduction.combine(total, piece)
        return total

    def hand_out(self, index: int, total: torch.Tensor) -> None:
        """Write this rank's reduced segment home, send it to all, and receive theirs."""
        own = self.segment(self.place, index)
        own.copy_(total)
        self._arrived[index] = {}
        group = self.group
        for place in self.others():
            self.last += group._receive(self.segment(place, index), self.members[place], GATHER_TAG)
        for place in self.others():
            self.last += group._send(own, self.members[place], GATHER_TAG)
