"""Small collectives by way of shared memory: the ranks of a group on one node leave their tensors on its board
(`board.py`), and each adds what all have left.

Invariants: whether a collective goes this way depends on what all ranks know alike, as its text does, never on where
or how a rank's tensor lies. The bits are those of the way that it would go otherwise: 16-bit floats are added in
float32 in the order of the ranks and rounded once, as our own algorithms do it; of other numbers only two are added,
for which there is one order. A tensor is read when its rank arrives, and written when all have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpitrain.mpi import json_collectives
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.board import Board, num_bytes
from mpitrain.mpi.engine.collective_queue import CollectiveQueue
from mpitrain.mpi.engine.doorbell import NodePeers, Place, SharedMemory
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.memory.device_aware import is_forced
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

_SLOT_BYTES, _MOST_BYTES = 1 << 18, 1 << 24
_MOST_VIEWS = 64
_ADDED = (torch.float32, torch.float64)


Way = tuple[Callable[[], None], Callable[[bool], None]]  # what is done on arrival, and when all have arrived


class TensorBoard:
    """The board of a group, for tensors."""

    def __init__(self, board: Board, queue: CollectiveQueue, rank: int, size: int, carries_any: bool):
        self.board, self.queue, self._rank, self._size = board, queue, rank, size
        self._carries_any = carries_any
        self._memory = torch.frombuffer(board.memory.map, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}

    def carries(self, dtype: torch.dtype, count: int, reduction: Reduction) -> bool:
        """Whether an allreduce of so many numbers, of this type on the wire, goes this way."""
        # of two zeros, or of NaN and a number, MIN and MAX are whichever comes first, or in whatever part of a tensor
        if not self.holds(dtype, count) or (dtype.is_floating_point and reduction.name in ("MIN", "MAX")):
            return False
        return self._size == 2 or is_sixteen(dtype)

    def holds(self, dtype: torch.dtype, count: int) -> bool:
        """Whether so many numbers are something, and fit what a rank may leave, where tensors go this way at all."""
        return self._carries_any and 0 < count * dtype.itemsize <= self.board.slot_bytes

    def deposit(self, memory: torch.Tensor) -> None:
        """Leave a contiguous host tensor."""
        self.board.copy_in(memory.data_ptr(), memory.nbytes)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """What the ranks have left, in their order."""
        key = (self.board.turn, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            size = count * dtype.itemsize
            starts = map(self.board.offset, range(self._size))
            found = self._views[key] = [self._memory[at : at + size].view(dtype) for at in starts]
        return found

    def add_up(self, into: torch.Tensor, wire: torch.dtype, reduction: Reduction) -> None:
        """Reduce what the ranks have left into a contiguous host tensor."""
        slots, flat = self.slots(wire, into.numel()), into.data  # as MPI writes it: autograd is not told
        if flat.dim() != 1:
            flat = flat.view(-1)
        if self._size == 2 and reduction.name == "SUM" and wire in _ADDED:  # nearly always
            torch.add(*slots, out=flat)
            if reduction.kind == "AVG":
                flat.div_(2)
            return
        total = slots[0].float() if is_sixteen(wire) else flat.copy_(slots[0])
        for slot in slots[1:]:
            reduction.combine(total, slot)
        reduction.after(total, self._size)
        if total is not flat:
            flat.copy_(total.to(wire))

    def of_plain(self, tensor: torch.Tensor, reduction: Reduction) -> Way:
        """How a plain tensor is left and added up."""

        def deposit() -> None:
            if reduction.factor is not None:
                reduction.before(tensor.data)
            self.board.copy_in(tensor.data_ptr(), tensor.nbytes)

        return deposit, lambda may_block: self.add_up(tensor, tensor.dtype, reduction)

    def lending(self, tensor: torch.Tensor, event: object, reduction: Reduction, wire: torch.dtype) -> Way:
        """How a tensor of any place and layout is left and added up."""
        buffers.check_travels(tensor)
        held: list[buffers.Lease] = []

        @torch.inference_mode()
        def deposit() -> None:
            held.append(buffers.lease(tensor, reads=True, writes=True, after=event, on_host=True))
            memory = held[0].memory
            reduction.before(memory)
            self.deposit(memory.to(wire).contiguous())

        @torch.inference_mode()
        def add_up(may_block: bool) -> None:
            self.add_up(held[0].memory, wire, reduction)
            held[0].finish()

        return deposit, add_up

    def broadcasting(self, tensor: torch.Tensor, event: object, root: int) -> Way:
        """How the root leaves such a tensor, and the others take it."""
        buffers.check_travels(tensor)
        is_root = self._rank == root

        @torch.inference_mode()
        def deposit() -> None:
            if is_root:
                held = buffers.lease(tensor, reads=True, writes=False, after=event, on_host=True)
                self.deposit(held.memory)
                held.finish()

        @torch.inference_mode()
        def take(may_block: bool) -> None:
            if not is_root:
                held = buffers.lease(tensor, reads=False, writes=True, after=event, on_host=True)
                held.memory.view(-1).copy_(self.slots(tensor.dtype, tensor.numel())[root])
                held.finish()

        return deposit, take


class Made(NamedTuple):
    """A group's board, who rings for its messages, and whether tensors are left on the board: none are where a rank's
    environment has MPI read device memory (MPITRAIN_GPU_BUFFERS=on), wherever they lie, since that is not known of the
    others' tensors, or where payloads are looked at."""

    board: Board
    peers: NodePeers
    carries_any: bool


def make(runtime: Runtime, comm: MPI.Intracomm, ranks: list[int]) -> Made | None:
    """Collective over the members, in the thread that owns MPI: the board of a new group, which all can use or none."""
    size, rank, neighbours = comm.size, comm.rank, runtime.neighbours
    one_node = len({runtime.nodes[member] for member in ranks}) == 1
    if neighbours is None or not one_node or size == 1 or runtime.fault_tolerance != "none":
        return None
    slot_bytes = min(_SLOT_BYTES, _MOST_BYTES // size & -4096)
    length = num_bytes(size, slot_bytes)
    memory = None
    with contextlib.suppress(OSError):
        memory = SharedMemory.made(length) if rank == 0 else None
    in_messages = is_forced() or runtime.payloads is not None
    every = json_collectives.allgather(comm, [memory and memory.place, in_messages])
    made = None
    with contextlib.suppress(OSError):
        if place := every[0][0]:
            shared, peers = memory or SharedMemory.at(Place(*place), length), neighbours.among(ranks)
            board = Board(shared, rank, size, slot_bytes, peers.bell, peers.words())
            made = Made(board, peers, not any(forced for _, forced in every))
    usable = all(json_collectives.allgather(comm, made is not None))
    if memory is not None:
        memory.close()
    return made if usable else None
