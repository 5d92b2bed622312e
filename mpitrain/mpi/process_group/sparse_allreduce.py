"""Allreduce of sparse tensors (COO), such as the gradients of `nn.Embedding(sparse=True)`.

Invariants: indices and values of all ranks are gathered, and every rank adds them up in the order of the ranks, so the
result is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.process_group.base import GroupBase, shape_of
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen


def sparse_allreduce(
    group: GroupBase, tensors: Sequence[torch.Tensor], opts: Any
) -> tuple[str, str, Callable[[bool], Task]]:
    """Name, description and task of the allreduce of tensors that are all sparse.

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
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                own = tensor.coalesce()
                indices, values = own.indices().T.contiguous(), own.values().contiguous()
            counts = np.zeros(group.size(), np.int64)
            counts[group.rank()] = len(indices)
            yield from group._call(may_block, "Allreduce", np.copy(counts), counts)
            gathered = []
            for mine in (indices, values):
                slots = [mine.new_empty((int(count), *mine.shape[1:])) for count in counts]
                yield from group._spread([slot.view(-1) for slot in slots], mine.view(-1))
                gathered.append(torch.cat(slots))
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                _write_sum(tensor, gathered[0], gathered[1], reduction, group.size())

    shapes = "; ".join(f"{tuple(tensor.shape)}, {tensor.sparse_dim()} sparse" for tensor in tensors)
    kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
    return "allreduce", f"sparse {shape_of(tensors)} {shapes}, {kinds}", carry


def _write_sum(
    tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, reduction: Reduction, size: int
) -> None:
    """Indices are by row; rows of the same index are added up in their order."""
    wide = values.float() if is_sixteen(values.dtype) else values.clone()
    total = torch.sparse_coo_tensor(indices.T.clone(), wide, tensor.shape, check_invariants=False).coalesce()
    summed = total.values()
    reduction.after(summed, size)
    summed = summed.to(tensor.dtype)
    tensor.copy_(
        torch.sparse_coo_tensor(
            total.indices(), summed, tensor.shape, check_invariants=False, is_coalesced=True
        )
    )
