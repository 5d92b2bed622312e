"""Sampled top-k with momentum correction and masking (Lin et al., "Deep Gradient Compression", ICLR 2018).

    v = mu v + x (momentum 0: v = x);  u = r + v;  send the largest |u_i|, k = density * n of each field
    r = u, v = v, both zero where something was sent

Invariants: what is sent is a copy (or its float16 rounding, whose error stays in r). The threshold comes
from a 1 % strided sample with a seeded offset; it is taken when between 0.8 k and 1.3 k numbers pass, else moved,
at most ten times. A dense message (warm-up) sends r + v and masks nothing: with momentum SGD's mean of the v it
*is* momentum SGD, so the optimizer itself must have no momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mpitrain.codecs import index_coding, message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Field, Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.codecs.sparse import Search, scatter
from mpitrain.errors import UsageError
from mpitrain.values import register

SPARSE, SPARSE16 = 6, 10  # kinds on the wire

SAMPLED = 0.01
LEAST_SAMPLE = 1024
MANY, FEW = 1.3, 0.8
MAX_TRIES = 10
TINY = 2.0**-126  # the smallest normal float32


class TopKEncoder(Encoder):
    """Args: density: k over the numbers of a field; momentum: mu; nesterov: mu v + x enters the residual in
    place of v; values: "float32" or "float16" on the wire; coding: of the indices.
    """

    def __init__(
        self, density: float = 1e-3, momentum: float = 0.0, nesterov: bool = False, values: str = "float32",
        coding: str = "auto", **shared: Any,
    ):  # fmt: skip
        super().__init__(**shared)
        self.density, self.momentum, self.nesterov = density, momentum, nesterov
        self.values, self.coding = values, coding

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        scaled = parts if alpha == 1.0 else [Part(part.flat * alpha, part.layout) for part in parts]
        sums = self._momentum_corrected(scaled)
        kept = self.memory.slot("residual", parts)
        for mine, step in zip(kept, sums, strict=True):
            mine.add_(step)
        dense = message_format.dense_numbers(
            [Part(mine, part.layout) for mine, part in zip(kept, parts)], plan, 1.0
        )
        for part, start, stop, _ in plan.dense:
            kept[part][start:stop] = 0
        indices, values = [], []
        self._search = Search()
        for part, field, offset in plan.fields:
            where, sent = self._take(kept[part], part, field)
            indices.append(where.cpu().numpy() + offset)
            values.append(sent.cpu())
        chosen = np.concatenate(indices) if indices else np.zeros(0, np.int64)
        coder, coded = index_coding.encode(chosen, plan.num_coded, self.coding)
        self.last["density"] = len(chosen) / max(1, plan.num_coded)
        kind = SPARSE16 if self.values == "float16" else SPARSE
        header = self._header(plan, kind, coder=coder, num_sent=len(chosen), extra=len(coded))
        return message_format.assemble(
            header, [dense, torch.cat(values) if values else torch.zeros(0), coded]
        )

    def _take(self, kept: torch.Tensor, part: int, field: Field) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices in the field of what is sent and the values; takes them out of the memory."""
        u = kept[field.start : field.start + field.numel]
        where = self._choose(u)
        sent = u[where].to(torch.float16 if self.values == "float16" else torch.float32)
        u[where] -= sent.to(u.dtype)
        if self.momentum:
            self._velocity[part][field.start : field.start + field.numel][where] = 0
        return where, sent

    def _choose(self, u: torch.Tensor) -> torch.Tensor:
        """Indices of about k of the largest magnitudes, and of no zero."""
        if self.density == 1.0:
            return self._search.find(u, TINY)
        k = max(1, round(self.density * u.numel()))
        stride = max(1, min(round(1 / SAMPLED), u.numel() // LEAST_SAMPLE))
        offset = (self.step * 2654435761 + self.seed) % stride
        sample = u[offset::stride].abs()
        rank = max(1, min(sample.numel(), round(k * sample.numel() / u.numel())))
        threshold = max(TINY, float(sample.topk(rank).values[-1]))
        where = self._search.find(u, threshold)
        for _ in range(MAX_TRIES if stride > 1 else 0):
            if len(where) > MANY * k:  # exact among the few that pass
                size = u[where].abs()
                return where[size >= size.topk(k).values[-1]]
            if len(where) >= FEW * k or threshold == TINY:
                break
            threshold = max(TINY, threshold * FEW)
            where = self._search.find(u, threshold)
        return where

    def _momentum_corrected(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """What enters the residual: x, or the velocity."""
        if not self.momentum:
            return [part.flat for part in parts]
        self._velocity = self.memory.slot("momentum", parts)
        for v, part in zip(self._velocity, parts, strict=True):
            v.mul_(self.momentum).add_(part.flat)
        if not self.nesterov:
            return self._velocity
        return [v * self.momentum + part.flat for v, part in zip(self._velocity, parts, strict=True)]

    def _drain(self, parts: Sequence[Part], plan: Plan) -> list[torch.Tensor]:
        sums = self._momentum_corrected(parts)
        kept = self.memory.slot("residual", parts)
        sent = [step + mine for step, mine in zip(sums, kept, strict=True)]
        self.memory.clear("residual")
        return sent


def add(received: message_format.Received) -> None:
    """parts += weight * the sent values."""
    header, reader, parts, plan, weight = received
    dtype = "<f2" if header.kind == SPARSE16 else "<f4"
    values = torch.from_numpy(reader.take(header.num_sent, dtype).copy()).float()
    indices = index_coding.decode(
        header.coder, reader.take(header.extra, "|u1"), header.num_sent, plan.num_coded
    )
    scatter(parts, plan, indices, values.mul_(weight))


@register("codec", "topk")
class TopK(Feedback):
    """The largest numbers of each parameter, by a sampled threshold.

    Lin et al., "Deep Gradient Compression", ICLR 2018.

    Args:
        density: share of each parameter's numbers to send.
        momentum: of the worker's own momentum, which is compressed in place of the gradient and masked where it was
            sent; the optimizer must then have none.
        nesterov: Nesterov's form of it.
        values: "float32" or "float16" on the wire.
        coding: of the indices, as in `threshold`.
    """

    encoder: ClassVar = TopKEncoder
    decoders: ClassVar = {SPARSE: Decoder(add, is_sparse=True), SPARSE16: Decoder(add, is_sparse=True)}

    density: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    values: str = "float32"
    coding: str = "auto"

    def check(self) -> None:
        super().check()
        self.hold("momentum", 0 <= self.momentum < 1, "must be in [0, 1)")
        if self.nesterov and not self.momentum:
            raise UsageError("topk: nesterov needs a momentum")
        self.hold("values", self.values in ("float32", "float16"), "must be float32 or float16")
