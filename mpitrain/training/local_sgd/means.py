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
import torch.distributed as dist

from mpitrain.codecs import EightBitEncoder, add_message, whole, write_message

_CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Means:
    """Takes means over `group` (default: all ranks); `sent_bytes` is what this rank has sent for it, headers of
    messages left out, `codec_s` the time spent rounding.

    Args:
        wire: "full", "float16", "bfloat16" or "int8".
    """

    def __init__(self, wire: str = "full", group: Any = None):
        self.wire, self.group = wire, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes, self.codec_s = 0.0, 0.0
        self._parts: dict[str, list[EightBitEncoder]] = {}
        self._own: dict[str, EightBitEncoder] = {}

    @torch.no_grad()
    def take(self, tensors: list[torch.Tensor], full: bool = False) -> list[torch.Tensor]:
        """The mean of each tensor; new tensors. All ranks pass the same shapes and dtypes. `full`: unrounded."""
        means: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for name, indices in _by_kind(tensors).items():
            flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
            if full or self.wire == "full":
                self._reduce(flat)
            elif self.wire == "int8":
                flat = self._eight_bits(name, flat)
            else:
                began_s = time.perf_counter()
                small = flat.to(_CASTS[self.wire])
                self.codec_s += time.perf_counter() - began_s
                self._reduce(small)
                flat = small.to(flat.dtype)
            pieces = flat.split([tensors[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                means[index] = piece.view(tensors[index].shape)
        return means

    def _reduce(self, flat: torch.Tensor) -> None:
        self.sent_bytes += 2 * (self.size - 1) / self.size * flat.numel() * flat.element_size()
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)

    def _eight_bits(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        began_s = time.perf_counter()
        parts = _cut(flat.float(), self.size)
        encoders = self._parts.setdefault(name, [EightBitEncoder(dense_below=0) for _ in parts])
        messages = torch.stack([one.encode(whole(part)) for one, part in zip(encoders, parts, strict=True)])
        self.codec_s += time.perf_counter() - began_s
        arrived = torch.empty_like(messages)
        dist.all_to_all_single(arrived, messages, group=self.group)
        began_s = time.perf_counter()
        mean = torch.zeros_like(parts[0])
        for message in arrived:
            add_message(message, whole(mean))
        own = self._own.setdefault(name, EightBitEncoder(dense_below=0)).encode(whole(mean.div_(self.size)))
        self.codec_s += time.perf_counter() - began_s
        spread = [torch.empty_like(own) for _ in parts]
        dist.all_gather(spread, own, group=self.group)
        for message, part in zip(spread, parts, strict=True):
            write_message(message, whole(part))
        self.sent_bytes += 2 * (self.size - 1) * own.numel()
        return torch.cat(parts)[: flat.numel()].to(flat.dtype)

    def state(self) -> dict[str, Any]:
        """What has been rounded off and not been sent yet."""
        parts = {name: [encoder.state() for encoder in encoders] for name, encoders in self._parts.items()}
        return {"parts": parts, "own": {name: encoder.state() for name, encoder in self._own.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, on as many ranks."""
        for name, states in state["parts"].items():
            self._parts[name] = [_restored(one) for one in states]
        self._own = {name: _restored(one) for name, one in state["own"].items()}


class MeansTogether:
    """The same means where all ranks are in one process: for simulations, which have no group. What a rank alone would
    have sent is counted on its `Share`."""

    class Share:
        """One rank's count."""

        def __init__(self) -> None:
            self.sent_bytes, self.codec_s = 0.0, 0.0

        def state(self) -> dict[str, Any]:
            """Nothing: a simulation writes no checkpoints."""
            return {}

    def __init__(self, wire: str, size: int):
        self.wire, self.size = wire, size
        self.shares = [self.Share() for _ in range(size)]
        self._parts: dict[tuple[str, int], list[EightBitEncoder]] = {}
        self._own: dict[str, list[EightBitEncoder]] = {}

    @torch.no_grad()
    def take(self, everybody: list[list[torch.Tensor]], full: bool = False) -> list[torch.Tensor]:
        """The mean of each tensor, of which every rank has brought one; sums are taken in rank order."""
        means: list[torch.Tensor] = [torch.empty(0)] * len(everybody[0])
        for name, indices in _by_kind(everybody[0]).items():
            flats = [torch.cat([one[index].detach().reshape(-1) for index in indices]) for one in everybody]
            wire = "full" if full else self.wire
            flat = self._eight_bits(name, flats) if wire == "int8" else self._mean(flats, _CASTS.get(wire))
            pieces = flat.split([everybody[0][index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                means[index] = piece.view(everybody[0][index].shape)
        return means

    def _mean(self, flats: list[torch.Tensor], cast: torch.dtype | None) -> torch.Tensor:
        numel, dtype = flats[0].numel(), flats[0].dtype
        self._sent(2 * (self.size - 1) / self.size * numel * (cast or dtype).itemsize)
        if cast is not None:
            flats = [flat.to(cast).float() for flat in flats]
        total = flats[0].clone()
        for flat in flats[1:]:
            total.add_(flat)
        total.div_(self.size)
        return total if cast is None else total.to(cast).to(dtype)

    def _eight_bits(self, name: str, flats: list[torch.Tensor]) -> torch.Tensor:
        arrived: list[list[torch.Tensor]] = []
        for rank, flat in enumerate(flats):
            parts = _cut(flat.float(), self.size)
            encoders = self._parts.setdefault((name, rank), [EightBitEncoder(dense_below=0) for _ in parts])
            arrived.append([one.encode(whole(part)) for one, part in zip(encoders, parts, strict=True)])
        owners = self._own.setdefault(name, [EightBitEncoder(dense_below=0) for _ in flats])
        parts = _cut(flats[0].float(), self.size)
        for rank, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            mean = torch.zeros_like(part)
            for messages in arrived:
                add_message(messages[rank], whole(mean))
            own = owner.encode(whole(mean.div_(self.size)))
            write_message(own, whole(part))
            self.shares[rank].sent_bytes += 2 * (self.size - 1) * own.numel()
        return torch.cat(parts)[: flats[0].numel()].to(flats[0].dtype)

    def _sent(self, num_bytes: float) -> None:
        for share in self.shares:
            share.sent_bytes += num_bytes


def _restored(state: dict[str, Any]) -> EightBitEncoder:
    encoder = EightBitEncoder(dense_below=0)
    encoder.restore(state)
    return encoder


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(f"{tensor.dtype} {tensor.device}", []).append(index)
    return kinds


def _cut(flat: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Equal parts, the last padded with zeros: messages of one length."""
    length = max(1, -(-flat.numel() // num_parts))
    missing = length * num_parts - flat.numel()
    return list((torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).split(length))
