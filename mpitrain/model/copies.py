"""What a state holds, for a caller who keeps it while training goes on."""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.system.looking import is_only_looked_at
from mpitrain.torch_versions import pytree


def copied(tree: object) -> Any:
    """`tree`, nested as it is, with a copy of each of its tensors; as it is for who only looks at it."""
    if is_only_looked_at():
        return tree
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)
