"""16-bit floats: q = round16(x), nothing kept back.

Invariants: float16 has 10 bits of fraction and ends at 65504 (beyond it is infinite, which stops the run);
bfloat16 has 7 and the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.codecs import message_format
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Part, Plan

_DTYPES = {message_format.FLOAT16: torch.float16, message_format.BFLOAT16: torch.bfloat16}


class Float16Encoder(Encoder):
    """float16 on the wire."""

    residual = ""
    number = message_format.FLOAT16

    def __init__(self, **shared: Any):
        super().__init__(**shared)
        self.dtype = _DTYPES[self.number]

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

    number = message_format.BFLOAT16


def add(
    reader: message_format.Reader,
    header: message_format.Header,
    parts: Sequence[Part],
    plan: Plan,
    weight: float,
) -> None:
    """parts += weight * the rounded numbers."""
    for part, start, stop, _ in plan.chunks():
        flat = parts[part].flat
        sent = reader.tensor(stop - start, "<i2", flat.device).view(_DTYPES[header.kind])
        flat[start:stop].add_(sent.float(), alpha=weight)
