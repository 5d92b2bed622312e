"""Stochastic levels, unbiased (Alistarh et al., "QSGD", NeurIPS 2017): nothing is kept back, E[q] = x.

    q_i = m xi_i / s, xi_i = floor(s x_i / m) or one more, at random so that the mean is right

Invariants: m is the largest magnitude of a bucket of 512 numbers, as in the paper's experiments: with the
Euclidean norm of its theorems, whose bounds on the variance hold for m too, the steps are seven times as wide on
Gaussian numbers. A level takes ceil(log2(2 s + 1)) bits.
The randomness is keyed by (seed, worker, message, parameter), so a message can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from zlib import crc32

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.bits import num_packed_bytes, pack, unpack_bytes
from mpitrain.codecs.eightbit import blocks
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.codecs.message_format import Decoder
from mpitrain.values import register

LEVELS = 9  # kinds on the wire

BUCKET = 512


class QsgdEncoder(Encoder):
    """Args: levels: s."""

    residual = ""

    def __init__(self, levels: int = 7, **shared: Any):
        super().__init__(**shared)
        self.levels = levels

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        largest, codes = [], []
        width = (2 * self.levels).bit_length()
        tiny = torch.finfo(torch.float32).tiny
        for field, (part, start, stop, _) in plan.field_chunks():
            x = blocks(parts[part].flat[start:stop], BUCKET)
            level = x.abs()
            most = level.amax(dim=1, keepdim=True)
            torch.mul(x, self.levels / most.clamp_min(self.levels * tiny), out=level)
            self._add_noise(level, f"{field.name}/{start - field.start}")
            code = level.clamp_(0, 2 * self.levels).to(torch.uint8)  # all positive: this rounds down
            largest.append(most.view(-1).mul_(alpha).cpu())
            codes.append(pack(code.view(-1)[: stop - start].cpu().numpy(), width))
        self.last["density"] = 1.0
        dense = message_format.dense_numbers(parts, plan, alpha)
        return message_format.assemble(
            self._header(plan, LEVELS, extra=self.levels), [dense, *largest, *codes]
        )

    def _add_noise(self, level: torch.Tensor, name: str) -> None:
        """level += s + a uniform draw from the middles of 2^16 steps in [0, 1). Rounded down, s + y is then right in
        the mean within 2^-17, for negative y as well."""
        key = np.random.SeedSequence([self.seed % 2**64, self.worker, self.step, crc32(name.encode())])
        if level.device.type == "cpu":  # four draws from a word: a seventh of the time of torch's generator
            words = np.random.SFC64(key).random_raw(-(-level.numel() // 4))
            draws = torch.from_numpy(words.view(np.int16))[: level.numel()].view_as(level)
        else:
            word = int(key.generate_state(1, np.uint64)[0]) >> 1
            generator = torch.Generator(level.device).manual_seed(word)
            draws = torch.empty_like(level, dtype=torch.int16).random_(-(2**15), 2**15, generator=generator)
        level.add_(draws, alpha=2.0**-16).add_(self.levels + 0.5 + 2.0**-17)


def add(received: message_format.Received) -> None:
    """parts += weight * m * level / s."""
    header, reader, parts, plan, weight = received
    largest = [
        torch.from_numpy(reader.take(-(-(stop - start) // BUCKET), "<f4").copy())
        for _, (_, start, stop, _) in plan.field_chunks()
    ]
    levels = header.extra
    width = (2 * levels).bit_length()
    for (_, (part, start, stop, _)), most in zip(plan.field_chunks(), largest, strict=True):
        flat = parts[part].flat
        data = reader.take(num_packed_bytes(stop - start, width), "|u1")
        code = (
            torch.from_numpy(unpack_bytes(data, width, stop - start)).to(flat.device, torch.float32) - levels
        )
        sent = blocks(code, BUCKET) * (most.to(flat.device).view(-1, 1) / levels)
        flat[start:stop].add_(sent.view(-1)[: stop - start], alpha=weight)


@register("codec", "qsgd")
class QSGD(Feedback):
    """Unbiased stochastic levels -s..s of the largest of 512 numbers: 4 bits a number for s = 7.

    Alistarh et al., NeurIPS 2017.
    """

    encoder: ClassVar = QsgdEncoder
    decoders: ClassVar = {LEVELS: Decoder(add)}
    has_residual: ClassVar[bool] = False

    levels: int = 7

    def check(self) -> None:
        super().check()
        self.hold("levels", 1 <= self.levels <= 127, "must be 1 to 127")
