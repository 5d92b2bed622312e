"""Allreduce of sparse tensors (COO), such as the gradients of `nn.Embedding(sparse=True)`.

The indices of all ranks are gathered, so every rank knows which occur. Then values are gathered too, or added up by an
allreduce of one entry for each index that occurs at all, whichever sends less (`algorithm_choice.adds_up`). On a board
(`on_board.py`) a rank leaves indices and values as it arrives, or the number of its entries alone where they do not
fit there.

Invariants: what decides is known to all ranks. Gathered values are added up in the order of the ranks, so the
result is the same on all of them, and the same whichever way they came. Indices are one number each, of 32 bits where
those suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.process_group.algorithm_choice import adds_up, index_bytes
from mpitrain.mpi.process_group.base import Call, shape_of
from mpitrain.mpi.process_group.on_board import TensorBoard
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen

_HEAD_BYTES = 16  # on a board: the number of entries, and room up to what every type is aligned to


def sparse_allreduce(
    group: Any, tensors: Sequence[torch.Tensor], opts: object
) -> tuple[Call, Callable[[bool], Task]]:
    """Call and task of the allreduce of tensors that are all sparse, over a `Reductions`.

    Raises:
        TypeError: tensors are of several layouts, on a device, or are not to be added up.
    """
    wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
    for tensor, reduction in zip(tensors, wanted):
        if not tensor.is_sparse or tensor.device.type != "cpu":
            raise TypeError(
                "an allreduce of sparse tensors takes COO tensors in host memory, and no others with them; got a "
                f"{tensor.layout} tensor on {tensor.device}"
            )
        if reduction.kind not in ("SUM", "AVG"):
            raise TypeError(f"sparse tensors are reduced with SUM or AVG, not {reduction.kind}")

    board: TensorBoard | None = group._board
    if len(tensors) > 1 or (board is not None and not board.holds(torch.uint8, _HEAD_BYTES)):
        board = None
    left: list[_Entries] = []

    def deposit() -> None:
        left.append(_entries_of(tensors[0]))
        assert board is not None
        board.deposit(left[0].packed(board.board.slot_bytes))

    def carry(may_block: bool) -> Task:
        for tensor, reduction in zip(tensors, wanted):
            own = left[0] if left else _entries_of(tensor)
            yield from _carry_one(group, may_block, tensor, reduction, own, board)

    shapes = "; ".join(f"{tuple(tensor.shape)}, {tensor.sparse_dim()} sparse" for tensor in tensors)
    kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
    call = Call("allreduce", f"sparse {shape_of(tensors)} {shapes}, {kinds}")
    return call if board is None else call._replace(deposit=deposit), carry


class _Entries(NamedTuple):
    """What one rank has: the number of each index, and its values."""

    numbers: torch.Tensor
    values: torch.Tensor

    def places(self, count: int) -> tuple[int, int]:
        """Of `count` such entries on the board: where their values begin and end, behind count and numbers."""
        at = -(-(_HEAD_BYTES + count * self.numbers.itemsize) // _HEAD_BYTES) * _HEAD_BYTES
        return at, at + count * math.prod(self.values.shape[1:]) * self.values.itemsize

    def packed(self, most_bytes: int) -> torch.Tensor:
        """The bytes of count, numbers and values; of the count alone where it would be more than that."""
        count = len(self.numbers)
        at, end = self.places(count)
        memory = torch.zeros(_HEAD_BYTES if end > most_bytes else end, dtype=torch.uint8)
        memory.numpy()[:8].view(np.int64)[0] = count
        if end <= most_bytes:
            memory[_HEAD_BYTES : _HEAD_BYTES + self.numbers.nbytes] = self.numbers.view(torch.uint8)
            memory[at:] = self.values.view(-1).view(torch.uint8)
        return memory

    def unpacked(self, slots: Sequence[torch.Tensor], counts: Sequence[int]) -> list[_Entries] | None:
        """What all ranks have left; None where one could not."""
        found = []
        for slot, count in zip(slots, counts):
            at, end = self.places(count)
            if end > len(slot):
                return None
            numbers = slot[_HEAD_BYTES : _HEAD_BYTES + count * self.numbers.itemsize].view(self.numbers.dtype)
            values = slot[at:end].view(self.values.dtype).view(count, *self.values.shape[1:])
            found.append(_Entries(numbers, values))
        return found


def _entries_of(tensor: torch.Tensor) -> _Entries:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        own = tensor.coalesce()
        return _Entries(
            _as_numbers(own.indices(), tensor.shape[: tensor.sparse_dim()]), own.values().contiguous()
        )


def _carry_one(
    group: Any, may_block: bool, tensor: torch.Tensor, reduction: Reduction, own: _Entries, board: TensorBoard | None
) -> Task:  # fmt: skip
    shape = tensor.shape[: tensor.sparse_dim()]
    values, on_board = own.values, None
    counts = np.zeros(group.size(), np.int64)
    if board is None:
        counts[group.rank()] = len(own.numbers)
        yield from group._call(may_block, "Allreduce", np.copy(counts), counts)
    else:
        slots = board.slots(torch.uint8, board.board.slot_bytes)
        counts[:] = [slot.numpy()[:8].view(np.int64)[0] for slot in slots]
        on_board = own.unpacked(slots, counts.tolist())
    every = on_board or [
        _Entries(own.numbers.new_empty(count), values.new_empty(count, *values.shape[1:]))
        for count in counts.tolist()
    ]
    if not on_board:
        yield from group._spread([each.numbers for each in every], own.numbers)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        different, places = torch.unique(torch.cat([each.numbers for each in every]), return_inverse=True)
        of_ranks = places.split(counts.tolist())
        summed = values.new_zeros((len(different), *values.shape[1:]))
    if adds_up(len(places), len(different)):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            summed[of_ranks[group.rank()]] = values
        yield from group._carried([summed], [reduction], [None], None, may_block)
    else:
        if not on_board:
            yield from group._spread([each.values.view(-1) for each in every], values.view(-1))
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            wide = summed.float() if is_sixteen(summed.dtype) else summed
            for at, each in zip(of_ranks, every):
                wide.index_add_(0, at, each.values.to(wide.dtype))
            reduction.after(wide, group.size())
            summed = wide.to(summed.dtype)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        where = _as_indices(different, shape)
        tensor.copy_(
            torch.sparse_coo_tensor(where, summed, tensor.shape, check_invariants=False, is_coalesced=True)
        )


def _as_indices(numbers: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What `_as_numbers` has made numbers of."""
    numbers = numbers.long()
    indices = numbers.new_empty((len(shape), len(numbers)))
    for dimension in reversed(range(len(shape))):
        indices[dimension] = numbers % shape[dimension]
        numbers = numbers // shape[dimension]
    return indices


def _as_numbers(indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Of indices with one row a dimension, one number each, in the order of memory."""
    numbers = torch.zeros(indices.shape[1], dtype=torch.int64)
    for row, length in zip(indices, shape):
        numbers = numbers * length + row
    return numbers.to(torch.int32 if index_bytes(shape) == 4 else torch.int64)
