"""PowerSGD: a matrix as two thin ones, by one warm-started power iteration (Vogels et al., NeurIPS 2019).

    M = r + x as (n, m);  P = mean over workers of M Q;  P = orthogonal(P);  Q = mean of M^T P;  q = P Q^T;  r = M - q

Invariants: P and Q are linear in M, so workers may sum them (`reduce`) and all hold the same bits; as a
message one worker's own P and Q travel. A matrix is compressed when (n + m) rank rate < n m, rate 2; everything
else travels in full. The first Q is keyed by (seed, name): the same on every worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Field, Part, Plan, plan_of
from mpitrain.codecs.lazy import torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.codecs.onebit import columns
from mpitrain.values import register

POWER = 8  # kinds on the wire

LEAST_RATE = 2


class PowerSgdEncoder(Encoder):
    """Args: rank: columns of P and Q."""

    def __init__(self, rank: int = 2, **shared: Any):
        super().__init__(**shared)
        self.rank = rank
        self._bases: dict[str, torch.Tensor] = {}

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        for part, start, stop, _ in plan.runs:
            kept[part][start:stop].add_(parts[part].flat[start:stop], alpha=alpha)
        chosen, others = self._chosen(plan)
        matrices = [columns(kept[part], field) for part, field in chosen]
        thin = self._iterate(chosen, matrices, lambda tensor: None)
        for matrix, (p, q) in zip(matrices, thin, strict=True):
            matrix.addmm_(p, q.T, alpha=-1)
        pieces = [_span(kept[part], field) for part, field in others]
        sections = [piece.cpu() for pair in thin for piece in pair] + [piece.clone() for piece in pieces]
        for piece in pieces:
            piece.zero_()
        self.last["density"] = 1.0
        dense = message_format.dense_numbers(parts, plan, alpha)
        return message_format.assemble(self._header(plan, POWER, extra=self.rank), [dense, *sections])

    def reduce(self, parts: Sequence[Part], mean: Callable[[torch.Tensor], None]) -> None:
        """Replace `parts` by their compressed mean over workers; `mean` averages a tensor in place over all.

        Three exchanges: what is not compressed, the P, the Q. Where a gradient of any worker is not finite, all
        find NaN in all of `parts` and no residual has changed.
        """
        plan = plan_of(parts, self.dense_below)
        alpha = self._alpha(parts)
        kept = self.memory.slot("residual", parts)
        for part, mine in zip(parts, kept, strict=True):
            if alpha is None:
                part.flat.fill_(math.nan)
            else:
                part.flat.mul_(alpha).add_(mine)
        chosen, others = self._chosen(plan)
        loose = [parts[part].flat[start:stop] for part, start, stop, _ in plan.dense]
        loose += [_span(parts[part].flat, field) for part, field in others]
        _mean_of(loose, mean)
        matrices = [columns(parts[part].flat, field) for part, field in chosen]
        thin = self._iterate(chosen, matrices, mean)
        self.step += 1
        numel = sum(tensor.numel() for tensor in [*loose, *(tensor for pair in thin for tensor in pair)])
        self.last.update(density=1.0, bytes=4.0 * numel)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in [*loose, *(q for _, q in thin)]):
            for part in parts:
                part.flat.fill_(math.nan)
            return
        for (place, field), matrix, (p, q) in zip(chosen, matrices, thin, strict=True):
            columns(kept[place], field).copy_(matrix).addmm_(p, q.T, alpha=-1)
            torch.mm(p, q.T, out=matrix)

    def _chosen(self, plan: Plan) -> tuple[list[tuple[int, Field]], list[tuple[int, Field]]]:
        """(part, field) of what is compressed and of what travels in full although it is not small."""
        pairs = [(part, field) for part, field, _ in plan.fields]
        compressed = [pair for pair in pairs if fits(pair[1], self.rank)]
        return compressed, [pair for pair in pairs if not fits(pair[1], self.rank)]

    def _iterate(
        self,
        chosen: list[tuple[int, Field]],
        matrices: list[torch.Tensor],
        mean: Callable[[torch.Tensor], None],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(P, Q) of every matrix; a finite Q is where the next step starts."""
        bases = [self._basis(field, matrix) for (_, field), matrix in zip(chosen, matrices, strict=True)]
        ps = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        _mean_of(ps, mean)
        ps = [_orthogonal(p) for p in ps]
        qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        _mean_of(qs, mean)
        for (_, field), q in zip(chosen, qs, strict=True):
            if bool(torch.isfinite(q).all()):
                self._bases[field.name] = q.clone()
        return list(zip(ps, qs, strict=True))

    def _basis(self, field: Field, matrix: torch.Tensor) -> torch.Tensor:
        if field.name not in self._bases:
            digest = blake2b(f"{self.seed}/{field.name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            self._bases[field.name] = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return self._bases[field.name].to(matrix.device)

    def state(self) -> dict[str, Any]:
        state = super().state()
        state["tensors"] |= {f"basis/{name}": basis.cpu().clone() for name, basis in self._bases.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        tensors = dict(state["tensors"])
        found = {name: tensors.pop(name) for name in list(tensors) if name.startswith("basis/")}
        self._bases = {
            name.removeprefix("basis/"): basis.clone()
            for name, basis in found.items()
            if basis.shape[-1] == self.rank  # of another rank: it begins with a fresh one
        }
        super().restore({**state, "tensors": tensors})


def fits(field: Field, rank: int) -> bool:
    """Whether two thin matrices of this rank are less than half of the field."""
    if len(field.shape) < 2:
        return False
    n = field.shape[0]
    m = field.numel // n
    return rank <= min(n, m) and (n + m) * rank * LEAST_RATE < n * m


def _span(flat: torch.Tensor, field: Field) -> torch.Tensor:
    return flat[field.start : field.start + field.numel]


def _orthogonal(p: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(p).Q if bool(torch.isfinite(p).all()) else p


def _mean_of(tensors: list[torch.Tensor], mean: Callable[[torch.Tensor], None]) -> None:
    """One exchange for all of them."""
    if not tensors:
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    mean(together)
    at = 0
    for tensor in tensors:
        tensor.copy_(together[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


def add(received: message_format.Received) -> None:
    """parts += weight * P Q^T."""
    header, reader, parts, plan, weight = received
    rank = header.extra
    for part, field, _ in plan.fields:
        if fits(field, rank):
            flat = columns(parts[part].flat, field)
            n, m = flat.shape
            p = reader.tensor(n * rank, "<f4", flat.device).view(n, rank)
            q = reader.tensor(m * rank, "<f4", flat.device).view(m, rank)
            flat.addmm_(p, q.T, alpha=weight)
    for part, field, _ in plan.fields:
        if not fits(field, rank):
            flat = parts[part].flat[field.start : field.start + field.numel]
            flat.add_(reader.tensor(field.numel, "<f4", flat.device), alpha=weight)


@register("codec", "powersgd")
class PowerSGD(Feedback):
    """Each n x m matrix travels as rank (n + m) numbers.

    Vogels et al., NeurIPS 2019. The two thin matrices are averaged themselves, so nothing decodes N messages.
    """

    encoder: ClassVar = PowerSgdEncoder
    decoders: ClassVar = {POWER: Decoder(add)}
    averages: ClassVar[bool] = True

    rank: int = 2

    def check(self) -> None:
        super().check()
        self.hold("rank", self.rank >= 1, "must be at least 1")
