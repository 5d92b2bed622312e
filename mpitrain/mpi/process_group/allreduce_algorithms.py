"""Reductions of our own over Isend and Irecv: every rank adds one part of all tensors and sends it to all ranks.

Invariants: each rank sends and receives (n - 1)/n of the tensor once for the reduce-scatter and once for the
allgather, which is the bound; in step s it sends to the s-th rank after it and receives from the s-th before it, so
that every link carries one message in each direction. Parts are cut into segments, and a segment is added and handed
on while the next ones travel. The owner of a part adds the contributions **in rank order**, 16-bit floats in float32,
rounded once: the bits depend on the tensors alone, not on timing, on the number of elements or on where an element
lies. (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, sections 4.4
and 4.5: pairwise exchange, then allgather.)

With several ranks on a node `hierarchical` sends each node's sum over the network once: reduce-scatter within the node,
allreduce between nodes, allgather within the node. 16-bit floats are then rounded once per node and once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen

if TYPE_CHECKING:
    from mpitrain.mpi.process_group.base import GroupBase

SCATTER_TAG, GATHER_TAG = 1, 2
WINDOW = 3  # segments under way at once in each direction
BLOCK_BYTES = 1 << 27  # larger tensors go in blocks of this size, which bounds the memory for what arrives

Finish = Callable[[torch.Tensor], None]  # what is done to a sum before it is rounded and handed out


def cut(flat: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The flat tensor as `num_parts` contiguous parts whose lengths differ by one at most."""
    short, rest = divmod(flat.numel(), num_parts)
    return list(flat.split([short + (index < rest) for index in range(num_parts)]))


def allreduce(
    group: GroupBase,
    flat: torch.Tensor,
    reduction: Reduction,
    finish: Finish,
    members: Sequence[int] | None = None,
    wire: torch.dtype | None = None,
) -> Task:
    """Reduce `flat` (host, one dimension) in place over `members` (ranks of the group, this one among them).

    `wire`: float32 travels as this 16-bit type; every contribution is rounded to it once, the sum in float32 once.
    """
    members = range(group.size()) if members is None else members
    for block in flat.split(BLOCK_BYTES // flat.element_size()):
        exchange = _Exchange(group, cut(block, len(members)), reduction, members, wire or flat.dtype)
        yield from exchange.scatter(finish, exchange.hand_out)
        yield from exchange.gather()


def reduce_scatter(
    group: GroupBase,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    reduction: Reduction,
    finish: Finish,
    members: Sequence[int] | None = None,
) -> Task:
    """`out` (flat) becomes this rank's part reduced over `members`; `parts[i]` (flat, any lengths) belongs to the i-th.
    `out` may be that part itself."""
    members = range(group.size()) if members is None else members
    exchange = _Exchange(group, parts, reduction, members, parts[0].dtype)

    def keep(index: int, total: torch.Tensor) -> None:
        out[index * exchange.length :][: total.numel()].copy_(total)

    yield from exchange.scatter(finish, keep)


def hierarchical(
    group: GroupBase,
    flat: torch.Tensor,
    reduction: Reduction,
    finish: Finish,
    nodes: Sequence[Sequence[int]],
    wire: torch.dtype | None = None,
) -> Task:
    """The same as `allreduce`; `nodes[k]` are the group's ranks on its k-th node, as many as there are (uneven, too).

    The k-th rank of a node reduces the k-th part with its likes on the other nodes; a node with more ranks than the
    smallest has only adds and receives there.
    """
    me = group.rank()
    mates = next(node for node in nodes if me in node)
    num_columns = min(len(node) for node in nodes)
    parts = cut(flat, num_columns)
    place = mates.index(me)
    owned = parts[place] if place < num_columns else flat[:0]
    padded = [*parts, *[flat[:0]] * (len(mates) - num_columns)]
    if len(mates) > 1:
        yield from reduce_scatter(group, padded, owned, reduction, lambda total: None, mates)
    if place < num_columns and flat.numel():
        column = [node[place] for node in nodes]
        yield from allreduce(group, owned, reduction, finish, column, wire)
    ops: list[Op] = []
    for other, rank in enumerate(mates):
        if rank != me:
            ops += group._send(owned, rank, GATHER_TAG)
            ops += group._receive(padded[other], rank, GATHER_TAG)
    yield ops


@dataclass(eq=False)
class _Exchange:
    """One reduce-scatter among `members`, and the allgather that may follow; all parts cut into as many segments."""

    group: GroupBase
    parts: Sequence[torch.Tensor]
    reduction: Reduction
    members: Sequence[int]
    wire: torch.dtype

    def __post_init__(self) -> None:
        self.place, self.count = self.members.index(self.group.rank()), len(self.members)
        longest = max(part.numel() for part in self.parts)
        self.length = max(1, min(self.group._segment_bytes() // self.wire.itemsize, longest))
        self.num_segments = -(-longest // self.length)
        self._handed: list[list[Op]] = []  # what the allgather has posted, in its order
        self._packed: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # (received in the wire's type, where it belongs)
        own = self.parts[self.place]
        self._arrived = {
            place: torch.empty_like(own, dtype=self.wire)
            for place in range(self.count)
            if place != self.place
        }

    def segment(self, place: int, index: int) -> torch.Tensor:
        """Segment `index` of that member's part; empty where the part is shorter."""
        return self.parts[place][index * self.length : (index + 1) * self.length]

    def scatter(self, finish: Finish, done: Callable[[int, torch.Tensor], None]) -> Task:
        """Add this rank's part; `done(index, total)` gets each segment, finished, in the type it is added in."""
        chunks = [(step, index) for step in range(1, self.count) for index in range(self.num_segments)]
        posted: list[list[Op]] = []
        for number, (step, index) in enumerate(chunks):
            while len(posted) < min(number + WINDOW, len(chunks)):
                posted.append(self._post_scatter(*chunks[len(posted)]))
            yield posted[number]
            posted[number] = []
            if step == self.count - 1:
                self._add(index, finish, done)
        if self.count == 1:
            for index in range(self.num_segments):
                self._add(index, finish, done)

    def gather(self) -> Task:
        """Wait for the parts of all ranks."""
        chunks = [(step, index) for step in range(1, self.count) for index in range(self.num_segments)]
        for number in range(len(chunks)):
            while len(self._handed) < min(number + WINDOW, len(chunks)):
                self._handed.append(self._post_gather(*chunks[len(self._handed)]))
            yield self._handed[number]
            self._handed[number] = []
        for buffer, target in self._packed:
            target.copy_(buffer)

    def hand_out(self, index: int, total: torch.Tensor) -> None:
        """Write this rank's reduced segment home and send it to the next rank at once: the allgather's first step."""
        self.segment(self.place, index).copy_(total.to(self.wire))
        if self.count > 1:
            self._handed.append(self._post_gather(1, index))

    def _post_scatter(self, step: int, index: int) -> list[Op]:
        to, source = (self.place + step) % self.count, (self.place - step) % self.count
        arriving = self._arrived[source][index * self.length : (index + 1) * self.length]
        piece = self.segment(to, index).to(self.wire)
        return self.group._receive(arriving, self.members[source], SCATTER_TAG) + self.group._send(
            piece, self.members[to], SCATTER_TAG
        )

    def _post_gather(self, step: int, index: int) -> list[Op]:
        to, source = (self.place + step) % self.count, (self.place - step) % self.count
        buffer = target = self.segment(source, index)
        if target.dtype != self.wire:
            buffer = torch.empty_like(target, dtype=self.wire)
            self._packed.append((buffer, target))
        own = self.segment(self.place, index).to(self.wire)
        return self.group._receive(buffer, self.members[source], GATHER_TAG) + self.group._send(
            own, self.members[to], GATHER_TAG
        )

    def _add(self, index: int, finish: Finish, done: Callable[[int, torch.Tensor], None]) -> None:
        """Reduce a segment over the members in rank order."""
        own = self.segment(self.place, index)
        arrived = slice(index * self.length, (index + 1) * self.length)
        pieces = [
            own.to(self.wire) if k == self.place else self._arrived[k][arrived] for k in range(self.count)
        ]
        total = pieces[0].float() if is_sixteen(self.wire) else pieces[0]
        if total.data_ptr() == own.data_ptr():
            total = own.clone()
        for piece in pieces[1:]:
            self.reduction.combine(total, piece)
        finish(total)
        done(index, total)
