"""8 bits, block-scaled: one float32 scale for 256 numbers (block-wise quantisation as in Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, with linear levels), rounded to nearest, error kept.

    s = max |u| / 127 over the block;  q = s round(u / s);  r = u - q

Invariants: blocks start anew with every parameter (and every chunk of one), the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import CHUNK, Part, Plan
from mpitrain.codecs.lazy import torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.values import register

EIGHTBIT = 4  # kinds on the wire

BLOCK = 256


def blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    """(num_blocks, size), padded with zeros."""
    missing = -flat.numel() % size
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(-1, size)


class EightBitEncoder(Encoder):
    """int8 with a scale a block, and error feedback."""

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        pieces = [run for _, run in plan.field_chunks()]
        counts = [-(-(run.stop - run.start) // BLOCK) for run in pieces]
        dense = message_format.dense_numbers(parts, plan, alpha)
        sheet = message_format.Sheet(
            self._header(plan, EIGHTBIT),
            dense,
            (sum(counts), torch.float32),
            (plan.num_coded, torch.int8),
        )
        scales, codes = sheet.sections
        scratch = torch.empty(CHUNK, device=kept[0].device) if kept else torch.empty(0)
        for (part, start, stop, offset), mine in zip(pieces, scales.split(counts), strict=True):
            residual = kept[part][start:stop].add_(parts[part].flat[start:stop], alpha=alpha)
            u = blocks(residual, BLOCK)
            work = scratch[: u.numel()].view_as(u)
            scale = torch.abs(u, out=work).amax(dim=1, keepdim=True).div_(127)
            code = torch.div(u, scale.clamp_min(torch.finfo(torch.float32).tiny), out=work).round_()
            u.addcmul_(code, scale, value=-1)
            if u.data_ptr() != residual.data_ptr():  # it was padded
                residual.copy_(u.view(-1)[: stop - start])
            mine.copy_(scale.view(-1))
            codes[offset : offset + stop - start].copy_(code.view(-1)[: stop - start])
        self.last["density"] = 1.0
        return sheet.message


def add(received: message_format.Received) -> None:
    """parts += weight * scale * code."""
    _, reader, parts, plan, weight = received
    scales = [
        torch.from_numpy(reader.take(-(-(stop - start) // BLOCK), "<f4").copy())
        for _, (_, start, stop, _) in plan.field_chunks()
    ]
    for (_, (part, start, stop, _)), scale in zip(plan.field_chunks(), scales, strict=True):
        flat = parts[part].flat
        code = blocks(reader.tensor(stop - start, "|i1", flat.device).float(), BLOCK)
        sent = (code * scale.to(flat.device).view(-1, 1)).view(-1)[: stop - start]
        flat[start:stop].add_(sent, alpha=weight)


@register("codec", "eightbit")
class EightBit(Feedback):
    """A quarter of the bytes: int8 with a float32 scale for 256 numbers.

    Dettmers et al., ICLR 2022.
    """

    encoder: ClassVar = EightBitEncoder
    decoders: ClassVar = {EIGHTBIT: Decoder(add)}
    sends_all: ClassVar[bool] = True
