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
from mpitrain.mpi.process_group.packing import broadcast_packed


class Collective(Protocol):
    """A rank that carries out collectives, such as `mpi/runtime.py` has it."""

    rank: int
    comm: Any

    def collective(self, function: Callable[[], Any], what: str) -> Any: ...


def broadcast_tensors(runtime: Collective, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrite `tensors` on every rank with those of `root`. All ranks pass the same shapes and dtypes in the same
    order.
    """
    is_root = runtime.rank == root

    def broadcast(tensor: torch.Tensor) -> None:
        lent = lease(tensor, reads=is_root, writes=not is_root)
        for message in lent.messages():
            runtime.collective(partial(runtime.comm.Bcast, message, root), f"broadcast from rank {root}")
        lent.finish()

    broadcast_packed(tensors, broadcast, is_root)
