"""16-bit floats: q = round16(x), nothing kept back.

Invariants: float16 has 10 bits of fraction and ends at 65504 (beyond it is infinite, which stops the run);
bfloat16 has 7 and the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Codec
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Part, Plan
from mpitrain.codecs.lazy import torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.values import register

FLOAT16, BFLOAT16 = 2, 3  # kinds on the wire


def _dtype(kind: int) -> torch.dtype:
    return torch.float16 if kind == FLOAT16 else torch.bfloat16


class Float16Encoder(Encoder):
    """float16 on the wire."""

    residual = ""
    number = FLOAT16

    def __init__(self, **shared: Any):
        super().__init__(**shared)
        self.dtype = _dtype(self.number)

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        dense = message_format.dense_numbers(parts, plan, alpha)
        sheet = message_format.Sheet(self._header(plan, self.number), dense, (plan.num_coded, self.dtype))
        (rounded,) = sheet.sections
        for part, start, stop, offset in plan.chunks():
            x = parts[part].flat[start:stop]
            rounded[offset : offset + stop - start] = x if alpha == 1.0 else x * alpha
        self.last["density"] = 1.0
        return sheet.message


class BFloat16Encoder(Float16Encoder):
    """bfloat16 on the wire."""

    number = BFLOAT16


def add(received: message_format.Received) -> None:
    """parts += weight * the rounded numbers."""
    header, reader, parts, plan, weight = received
    for part, start, stop, _ in plan.chunks():
        flat = parts[part].flat
        sent = reader.tensor(stop - start, "<i2", flat.device).view(_dtype(header.kind))
        flat[start:stop].add_(sent.float(), alpha=weight)


@register("codec", "float16")
class Float16(Codec):
    """Half the bytes; 10 bits of fraction, infinite above 65504. Sums are taken in float32 over MPI."""

    encoder: ClassVar = Float16Encoder
    decoders: ClassVar = {FLOAT16: Decoder(add)}
    averages: ClassVar[bool] = True
    cast: ClassVar[str] = "float16"
    sends_all: ClassVar[bool] = True


@register("codec", "bfloat16")
class BFloat16(Codec):
    """Half the bytes; 7 bits of fraction, the range of float32. Sums are taken in float32 over MPI."""

    encoder: ClassVar = BFloat16Encoder
    decoders: ClassVar = {BFLOAT16: Decoder(add)}
    averages: ClassVar[bool] = True
    cast: ClassVar[str] = "bfloat16"
    sends_all: ClassVar[bool] = True
