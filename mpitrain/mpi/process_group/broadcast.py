"""Broadcasting one rank's tensors to all ranks.

Invariants: a collective at start-up, of tensors of any place and layout (host or device, strided or dense), piece by
piece in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from mpitrain.mpi.memory.buffers import lease


class Collective(Protocol):
    """A rank that carries out collectives, such as `mpi/runtime.py` has it."""

    rank: int
    comm: Any

    def collective(self, function: Callable[[], Any], what: str) -> Any: ...


@torch.no_grad()
def broadcast_tensors(runtime: Collective, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrite `tensors` on every rank with those of `root`. All ranks pass the same shapes and dtypes in the same
    order.
    """
    for tensor in tensors:
        lent = lease(tensor, reads=runtime.rank == root, writes=runtime.rank != root)
        for message in lent.messages():
            runtime.collective(partial(runtime.comm.Bcast, message, root), f"broadcast from rank {root}")
        lent.finish()
