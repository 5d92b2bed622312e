"""Bits that `--inject flip(...)` orders to flip, in what a rank holds or receives.

Invariants: the tensor is changed as a fault of memory changes it: no version counter moves, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpitrain.errors import UsageError
from mpitrain.inject import Flip
from mpitrain.training.replica_guard import Named


class Flips:
    """Flips bits on this rank.

    Args:
        held: what other ranks hold, too; state: the optimizer's.
        in_payload: has this bit of this message flip, of those that are received from now on.
    """

    def __init__(
        self,
        held: Callable[[], Named],
        state: Callable[[], Named],
        in_payload: Callable[[int, int], None] | None = None,
    ):
        self._named = {"parameters": held, "optimizer": state}
        self._in_payload = in_payload

    def carry_out(self, flip: Flip) -> None:
        """Flip it now, or when the message comes.

        Raises:
            UsageError: the optimizer holds no state.
        """
        if flip.what == "payload":
            assert self._in_payload is not None, "refused before"
            self._in_payload(flip.tensor, flip.bit)
            return
        tensors = [tensor for _, tensor in self._named[flip.what]() if tensor.numel()]
        if not tensors:
            raise UsageError(f'--inject "{flip}": there is no such tensor: the optimizer holds no state')
        flip_bit(tensors[flip.tensor % len(tensors)], flip.bit)


@torch.no_grad()
def flip_bit(tensor: torch.Tensor, bit: int) -> None:
    """Flip bit number `bit`, counted round, of a tensor of any layout."""
    num_bits = 8 * tensor.element_size()
    number, bit = divmod(bit % (tensor.numel() * num_bits), num_bits)
    place = torch.unravel_index(torch.tensor(number), tensor.shape)
    whole = tensor.data  # whose changes no version counts
    value = whole[place].reshape(1).clone()
    value.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    whole[place] = value[0]
