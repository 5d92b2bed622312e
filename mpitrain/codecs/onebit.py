"""One bit a number, two means a column (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014).

    q = mean of the u >= 0 of its column, or mean of the u < 0;  r = u - q

Invariants: a column is what flows into one output, that is a row of torch's (out, in) weights, all but the
first dimension of any other tensor. Within a column the residuals of each sign add up to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import CHUNK, Field, Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.values import register

ONEBIT = 7  # kinds on the wire


def columns(flat: torch.Tensor, field: Field) -> torch.Tensor:
    """The field as (columns, numbers a column), a view."""
    rows = field.shape[0] if len(field.shape) > 1 else 1
    return flat[field.start : field.start + field.numel].view(rows, -1)


class OneBitEncoder(Encoder):
    """Signs and column means, with error feedback."""

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        means, signs = [], np.empty(plan.num_coded, bool)
        at = 0
        for part, field, _ in plan.fields:
            grown = columns(kept[part], field)
            rows = max(1, CHUNK // grown.shape[1])
            for u, x in zip(grown.split(rows), columns(parts[part].flat, field).split(rows), strict=True):
                u.add_(x, alpha=alpha)
                np.greater_equal(u.cpu().numpy().reshape(-1), 0, out=signs[at : at + u.numel()])
                at += u.numel()
                means.append(_quantise(u).cpu())
        packed = np.packbits(signs, bitorder="little")
        self.last["density"] = 1.0
        dense = message_format.dense_numbers(parts, plan, alpha)
        return message_format.assemble(self._header(plan, ONEBIT), [dense, *means, packed])


def _quantise(u: torch.Tensor) -> torch.Tensor:
    """Column means of the numbers >= 0 and of those below, (columns, 2); leaves in u what is lost."""
    positive = torch.ge(u, 0, out=torch.empty_like(u))  # as floats: several times as fast as bools
    num_positive = positive.sum(dim=1)
    total, work = u.sum(dim=1), positive * u
    sum_positive = work.sum(dim=1)
    above = sum_positive / num_positive.clamp_min(1)
    below = (total - sum_positive).clamp_max_(0).div_((u.shape[1] - num_positive).clamp_min(1))
    means = torch.stack([above, below], dim=1)
    u.sub_(_spread(positive, means))
    return means


def _spread(positive: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The mean that each sign (1 or 0) names, in place: the very numbers on both sides."""
    above, below = means[:, :1], means[:, 1:]
    return positive.mul_(above - below).add_(below)


def add(received: message_format.Received) -> None:
    """parts += weight * the mean that the sign names."""
    _, reader, parts, plan, weight = received
    means = []
    for part, field, _ in plan.fields:
        num_columns = columns(parts[part].flat, field).shape[0]
        pair = torch.from_numpy(reader.take(2 * num_columns, "<f4").copy()).view(num_columns, 2)
        means.append(pair.to(parts[part].flat.device))
    bits = np.unpackbits(
        reader.take((plan.num_coded + 7) // 8, "|u1"), count=plan.num_coded, bitorder="little"
    )
    for (part, field, offset), pair in zip(plan.fields, means, strict=True):
        flat = columns(parts[part].flat, field)
        positive = torch.from_numpy(bits[offset : offset + field.numel]).view_as(flat)
        rows = max(1, CHUNK // flat.shape[1])
        for mine, signs, both in zip(flat.split(rows), positive.split(rows), pair.split(rows), strict=True):
            mine.add_(_spread(signs.to(flat.device, torch.float32), both), alpha=weight)


@register("codec", "onebit")
class OneBit(Feedback):
    """Signs, and two means for what flows into each output: 32 times fewer bytes.

    Seide et al., Interspeech 2014.
    """

    encoder: ClassVar = OneBitEncoder
    decoders: ClassVar = {ONEBIT: Decoder(add)}
