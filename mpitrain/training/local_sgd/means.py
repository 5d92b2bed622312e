"""Means of tensors over all ranks, in full or in few bits.

Invariants: every rank ends with the same bits. 16-bit numbers are summed in float32 by the group itself; 8-bit
ones by us: rank r gets everybody's codes of the r-th part, sums them in float32 in rank order, and hands the mean out
in codes again, so a rank sends 2 (N - 1)/N of the tensor in 8 bits. What either coding rounds off is kept and added
next time (error feedback, as in `codecs/`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from mpitrain.codecs import add_message, whole, write_message
from mpitrain.codecs.eightbit import EightBitEncoder
from mpitrain.system import trace
from mpitrain.training.synchronous.collectives import GroupCollectives

CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Means:
    """Takes means over the ranks of `collectives`; `sent_bytes` is what this rank has sent for it, headers of
    messages left out, `codec_s` the time spent rounding.

    Args:
        wire: "full", "float16", "bfloat16" or "int8".
    """

    def __init__(self, wire: str, collectives: GroupCollectives):
        self.wire, self.collectives = wire, collectives
        self.size, self.rank = collectives.size, collectives.rank
        self.sent_bytes, self.codec_s = 0.0, 0.0
        self._parts: dict[str, list[EightBitEncoder]] = {}
        self._own: dict[str, EightBitEncoder] = {}

    @torch.no_grad()
    def means_of(
        self, tensors: list[torch.Tensor], full: bool = False, counted: bool = True, piece: int | None = None
    ) -> list[torch.Tensor]:
        """The mean of each tensor; new tensors. All ranks pass the same shapes and dtypes. `full`: unrounded;
        `counted`: its bytes are added to `sent_bytes`; `piece`: which of the parameters' pieces they are, to each of
        which belongs what was rounded off of it."""
        sent_bytes = self.sent_bytes
        means: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for name, indices in by_kind(tensors).items():
            flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
            if full or self.wire == "full":
                self._reduce(flat)
            elif self.wire == "int8":
                flat = self._eight_bits(name_of_piece(name, piece), flat)
            else:
                began_s = time.perf_counter()
                with trace.span("cast", trace.CODEC):
                    small = flat.to(CASTS[self.wire])
                self.codec_s += time.perf_counter() - began_s
                self._reduce(small)
                flat = small.to(flat.dtype)
            split = flat.split([tensors[index].numel() for index in indices])
            for index, mean in zip(indices, split, strict=True):
                means[index] = mean.view(tensors[index].shape)
        if not counted:
            self.sent_bytes = sent_bytes
        return means

    def _reduce(self, flat: torch.Tensor) -> None:
        self.sent_bytes += 2 * (self.size - 1) / self.size * flat.numel() * flat.element_size()
        self.collectives.mean(flat)

    @trace.spanned("average in eight bits", trace.CODEC)
    def _eight_bits(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        began_s = time.perf_counter()
        parts = equal_parts(flat.float(), self.size)
        encoders = self._parts.setdefault(name, [EightBitEncoder(dense_below=0) for _ in parts])
        messages = torch.stack([one.encode(whole(part)) for one, part in zip(encoders, parts, strict=True)])
        self.codec_s += time.perf_counter() - began_s
        arrived = self.collectives.exchange(messages)
        began_s = time.perf_counter()
        mean = torch.zeros_like(parts[0])
        for message in arrived:
            add_message(message, whole(mean))
        own = self._own.setdefault(name, EightBitEncoder(dense_below=0)).encode(whole(mean.div_(self.size)))
        self.codec_s += time.perf_counter() - began_s
        spread = self.collectives.everybody(own)
        for message, part in zip(spread, parts, strict=True):
            write_message(message, whole(part))
        self.sent_bytes += 2 * (self.size - 1) * own.numel()
        return torch.cat(parts)[: flat.numel()].to(flat.dtype)

    def state(self) -> dict[str, Any]:
        """What has been rounded off and not been sent yet."""
        parts = {name: [encoder.state() for encoder in encoders] for name, encoders in self._parts.items()}
        return {"parts": parts, "own": {name: encoder.state() for name, encoder in self._own.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; among another number of ranks nothing is kept, for parts are others."""
        if any(len(states) != self.size for states in state["parts"].values()):
            return
        for name, states in state["parts"].items():
            self._parts[name] = [_restored(one) for one in states]
        self._own = {name: _restored(one) for name, one in state["own"].items()}


def _restored(state: dict[str, Any]) -> EightBitEncoder:
    encoder = EightBitEncoder(dense_below=0)
    encoder.restore(state)
    return encoder


def name_of_piece(kind: str, number: int | None) -> str:
    """By which what is rounded off of a piece's tensors of one kind is known; None: of all, as in checkpoints from
    before there were pieces."""
    return kind if number is None else f"{kind} {number}"


def by_kind(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Indices of the tensors of each dtype and device."""
    kinds: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(f"{tensor.dtype} {tensor.device}", []).append(index)
    return kinds


def equal_parts(flat: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Equal parts, the last padded with zeros: messages of one length."""
    length = max(1, -(-flat.numel() // num_parts))
    missing = length * num_parts - flat.numel()
    return list((torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).split(length))
