"""The codecs of the course and what each promises; a new codec is one row."""

from dataclasses import dataclass

import torch

from mpitrain import strategies
from mpitrain.codecs import Part, whole, write_message
from mpitrain.codecs.base import Codec
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of

# A matrix, a bias that is small, two matrices that are neighbours, and a large vector.
ENTRIES = [
    ("a.weight", (96, 64)),
    ("a.bias", (96,)),
    ("b.weight", (40, 96)),
    ("c.weight", (2, 8, 9, 10)),
    ("d", (2000,)),
]
LAYOUT = make_layout_of(ENTRIES)
NUMEL = LAYOUT[-1].start + LAYOUT[-1].numel


@dataclass(frozen=True)
class Entry:
    """codec; exact: D(q) + r == u to the bit for a rounded tau or copied values; bits: at most so many for each
    coded number (sparse: for each that was sent).
    """

    codec: Codec
    exact: bool
    bits: float
    sparse: bool = False


COURSE = {
    "float16": Entry(strategies.Float16(), False, 16),
    "bfloat16": Entry(strategies.BFloat16(), False, 16),
    "eightbit": Entry(strategies.EightBit(), False, 8.2),
    "threshold": Entry(strategies.Threshold(density=0.02), True, 17.1, sparse=True),
    "threshold power of two": Entry(
        strategies.Threshold(density=0.02, rounding="power_of_two"), True, 17.1, sparse=True
    ),
    "threshold raw": Entry(strategies.Threshold(density=0.02, coding="raw"), True, 33.1, sparse=True),
    "threshold elias_fano": Entry(
        strategies.Threshold(density=0.02, coding="elias_fano"), True, 10.5, sparse=True
    ),
    "topk": Entry(strategies.TopK(density=0.02), True, 41, sparse=True),
    "topk float16": Entry(strategies.TopK(density=0.02, values="float16"), True, 25, sparse=True),
    "onebit": Entry(strategies.OneBit(), False, 3),
    "powersgd": Entry(strategies.PowerSGD(rank=1), False, 12),
    "qsgd": Entry(strategies.QSGD(), False, 4.2),
}


def gradients(step=0, scale=1e-2, worker=0):
    """Seeded, the size of real ones."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(NUMEL, generator=generator) * scale


def dyadic(step=0, worker=0):
    """Multiples of 2^-20: float32 adds some thousand of them exactly."""
    return (gradients(step, worker=worker) * 2**20).round() / 2**20


def part(flat):
    return [Part(flat, LAYOUT)]


def decoded(message, layout=LAYOUT):
    flat = torch.full((layout[-1].start + layout[-1].numel,), 7.0)
    write_message(message, [Part(flat, layout)])
    return flat


def residual(encoder):
    """The flat residual, zero where none is kept."""
    flat = torch.zeros(NUMEL)
    tensors = encoder.memory.state()
    for field in LAYOUT:
        kept = tensors.get(f"residual/{field.name}")
        if kept is not None:
            flat[field.start : field.start + field.numel] = kept.reshape(-1)
    return flat


__all__ = [
    "COURSE",
    "ENTRIES",
    "LAYOUT",
    "NUMEL",
    "decoded",
    "dyadic",
    "gradients",
    "make_encoder",
    "part",
    "residual",
    "whole",
]
