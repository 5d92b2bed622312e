"""Everybody starts from rank 0's tensors.

Law of this file: a collective at start-up, of whatever lies anywhere (host or device, strided or dense),
piece by piece in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from mpitrain.mpi.buffers import lease

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


@torch.no_grad()
def broadcast_tensors(runtime: Runtime, tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite `tensors` on every rank with rank 0's. All ranks pass the same shapes and dtypes in the same
    order.
    """
    for tensor in tensors:
        lent = lease(tensor, reads=runtime.rank == 0, writes=runtime.rank != 0)
        for message in lent.messages():
            runtime.together(partial(runtime.comm.Bcast, message, 0))
        lent.finish()
