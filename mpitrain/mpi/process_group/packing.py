"""Tensors that travel together: small ones of one dtype are one message.

Invariants: which ones do follows from shapes and dtypes alone, so ranks whose devices differ pack alike. Knows no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

PACKED_BYTES = 4 << 20  # of tensors that travel together, at most


@torch.no_grad()
def broadcast_packed(
    tensors: Iterable[torch.Tensor], broadcast: Callable[[torch.Tensor], object], is_root: bool
) -> None:
    """Overwrite `tensors` with the root's by `broadcast`, which does so with one: large ones as they are, small ones
    packed.
    """
    for pack in _packs(tensors):
        if len(pack) == 1:
            broadcast(pack[0])
            continue
        sizes = [tensor.numel() for tensor in pack]
        packed = torch.empty(sum(sizes), dtype=pack[0].dtype, device=pack[0].device)
        parts = [part.view(tensor.shape) for part, tensor in zip(packed.split(sizes), pack, strict=True)]
        if is_root:
            torch._foreach_copy_(parts, pack)
        broadcast(packed)
        if not is_root:
            torch._foreach_copy_(pack, parts)


def _packs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All tensors, each once, in lists of one dtype and of at most PACKED_BYTES; a larger one is alone."""
    begun: dict[torch.dtype, list[torch.Tensor]] = {}
    num_bytes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = tensor.dtype
        if kind in begun and num_bytes[kind] + tensor.nbytes > PACKED_BYTES:
            yield begun.pop(kind)
        if kind not in begun:
            begun[kind], num_bytes[kind] = [], 0
        begun[kind].append(tensor)
        num_bytes[kind] += tensor.nbytes
    yield from begun.values()
