"""A state tree of one rank, handed on to all ranks.

Invariants: the tensors travel one after the other, from their own memory into that of the tensors that they become, so
no rank holds a tree twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpitrain.checkpoint.state_tree import join, split

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks


def share_tree(runtime: Ranks, tree: object, root: int = 0) -> Any:
    """Collective: the state tree of `root` on every rank, tensors in host memory; `root` itself gets what it gave."""
    tensors: dict[str, torch.Tensor] = {}
    description = None
    if runtime.rank == root:
        structure, tensors = split(tree)
        shapes = {name: [str(one.dtype).split(".")[1], list(one.shape)] for name, one in tensors.items()}
        description = [structure, shapes]
    structure, shapes = runtime.broadcast(description, root)
    if runtime.rank != root:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()
        }
    runtime.broadcast_tensors(list(tensors.values()), root)
    return tree if runtime.rank == root else join(structure, tensors)
