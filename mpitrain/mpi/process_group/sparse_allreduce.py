"""Allreduce of sparse tensors (COO), such as the gradients of `nn.Embedding(sparse=True)`.

The indices of all ranks are gathered, so every rank knows which occur. Then values are gathered too, or added up by an
allreduce of one entry for each index that occurs at all, whichever sends less (`algorithm_choice.adds_up`).

Invariants: what decides is known to all ranks. Gathered values are added up in the order of the ranks, so the
result is the same on all of them. Indices are one number each, of 32 bits where those suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.process_group.algorithm_choice import adds_up, index_bytes
from mpitrain.mpi.process_group.base import Call, shape_of
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen


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

    def carry(may_block: bool) -> Task:
        for tensor, reduction in zip(tensors, wanted):
            yield from _carry_one(group, may_block, tensor, reduction)

    shapes = "; ".join(f"{tuple(tensor.shape)}, {tensor.sparse_dim()} sparse" for tensor in tensors)
    kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
    return Call("allreduce", f"sparse {shape_of(tensors)} {shapes}, {kinds}"), carry


def _carry_one(group: Any, may_block: bool, tensor: torch.Tensor, reduction: Reduction) -> Task:
    shape = tensor.shape[: tensor.sparse_dim()]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        own = tensor.coalesce()
        indices, values = _as_numbers(own.indices(), shape), own.values().contiguous()
    counts = np.zeros(group.size(), np.int64)
    counts[group.rank()] = len(indices)
    yield from group._call(may_block, "Allreduce", np.copy(counts), counts)
    gathered = [indices.new_empty(int(count)) for count in counts]
    yield from group._spread(gathered, indices)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        different, places = torch.unique(torch.cat(gathered), return_inverse=True)
        of_ranks = places.split([int(count) for count in counts])
        summed = values.new_zeros((len(different), *values.shape[1:]))
    if adds_up(len(places), len(different)):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            summed[of_ranks[group.rank()]] = values
        yield from group._carried([summed], [reduction], [None], None, may_block)
    else:
        slots = [values.new_empty((int(count), *values.shape[1:])) for count in counts]
        yield from group._spread([slot.view(-1) for slot in slots], values.view(-1))
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            wide = summed.float() if is_sixteen(summed.dtype) else summed
            for at, slot in zip(of_ranks, slots):
                wide.index_add_(0, at, slot.to(wide.dtype))
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
