"""One bit a number, two means a column (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014).

    q = mean of the u >= 0 of its column, or mean of the u < 0;  r = u - q

Law of this file: a column is what flows into one output, that is a row of torch's (out, in) weights, all but the
first dimension of any other tensor. Within a column the residuals of each sign add up to zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpitrain.codecs import wire
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import CHUNK, Field, Part, Plan


def columns(flat: torch.Tensor, field: Field) -> torch.Tensor:
    """The field as (columns, numbers a column), a view."""
    rows = field.shape[0] if len(field.shape) > 1 else 1
    return flat[field.start : field.start + field.numel].view(rows, -1)


class OneBitEncoder(Encoder):
    """Signs and column means, with error feedback."""

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        means, signs = [], []
        for part, field, _ in plan.fields:
            grown = columns(kept[part], field)
            rows = max(1, CHUNK // grown.shape[1])
            for u, x in zip(grown.split(rows), columns(parts[part].flat, field).split(rows), strict=True):
                above, below, positive = _quantise(u.add_(x, alpha=alpha))
                means += [torch.stack([above, below], dim=1).cpu()]
                signs.append(positive.view(-1).cpu().numpy())
        packed = np.packbits(np.concatenate(signs), bitorder="little") if signs else np.zeros(0, np.uint8)
        self.last["density"] = 1.0
        dense = wire.dense_numbers(parts, plan, alpha)
        return wire.assemble(self._header(plan, wire.ONEBIT), [dense, *means, packed])


def _quantise(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Column means of the positive and of the negative numbers, and which are positive; leaves in u what is lost."""
    positive = u >= 0
    num_positive = positive.sum(dim=1)
    total, magnitude = u.sum(dim=1), u.abs().sum(dim=1)
    above = ((magnitude + total) / 2).div_(num_positive.clamp_min(1))
    below = ((total - magnitude) / 2).div_((u.shape[1] - num_positive).clamp_min(1))
    u.sub_(torch.where(positive, above[:, None], below[:, None]))
    return above, below, positive


def add(reader: wire.Reader, header: wire.Header, parts: Sequence[Part], plan: Plan, weight: float) -> None:
    """parts += weight * the mean that the sign names."""
    means = []
    for part, field, _ in plan.fields:
        rows = columns(parts[part].flat, field).shape[0]
        pair = torch.from_numpy(reader.take(2 * rows, "<f4").copy()).view(rows, 2)
        means.append(pair.to(parts[part].flat.device).unbind(dim=1))
    bits = np.unpackbits(
        reader.take((plan.num_coded + 7) // 8, "|u1"), count=plan.num_coded, bitorder="little"
    ).view(bool)
    for (part, field, offset), (above, below) in zip(plan.fields, means, strict=True):
        flat = columns(parts[part].flat, field)
        positive = torch.from_numpy(bits[offset : offset + field.numel]).to(flat.device).view_as(flat)
        flat.add_(torch.where(positive, above[:, None], below[:, None]), alpha=weight)
