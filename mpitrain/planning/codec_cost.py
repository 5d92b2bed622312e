"""What a codec's messages weigh for a model and what they cost on this machine: measured, not guessed.

Invariants: random numbers of one seed stand for gradients; the codec's own encoder and decoder run over as much
of the model as takes a fraction of a second, on one thread, and the rest is extrapolated from that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.codecs import Encoder, Part, add_message
from mpitrain.codecs.base import Codec
from mpitrain.codecs.message_format import HEADER_BYTES
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of

TRIED = 1 << 21  # numbers
REPEATS = 3

Entry = tuple[str, tuple[int, ...]]


class CodecCost(NamedTuple):
    """message_bytes: of one worker, once the density is reached; encode_s, decode_s: of one message, on one core;
    measured, total: numbers that were coded for this, and all.
    """

    message_bytes: int
    encode_s: float
    decode_s: float
    measured: int
    total: int


def measure_codec(codec: Codec, module: nn.Module) -> CodecCost:
    """Bytes and seconds of one message for this module.

    Raises:
        UsageError: `none`, which has no messages, is the caller's to leave out; numbers that no codec takes.
    """
    entries: list[Entry] = [
        (name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad
    ]
    chosen = _first(entries, TRIED)
    layout = make_layout_of(chosen)
    total, tried = (sum(torch.Size(shape).numel() for _, shape in some) for some in (entries, chosen))
    numbers = torch.randn(tried, generator=torch.Generator().manual_seed(0))
    parts, sums = [Part(numbers, layout)], [Part(torch.zeros(tried), layout)]
    encoder = make_encoder(codec)
    encoder.warmup_steps = 0
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        message = encoder.encode(parts)
        encode_s = _least_s(lambda: encoder.encode(parts), lambda: encoder.memory.clear(encoder.residual))
        decode_s = _least_s(lambda: add_message(message, sums))
    finally:
        torch.set_num_threads(num_threads)
    scale = total / max(1, tried)
    size = _scaled(int(message.numel()), encoder, entries, chosen)
    return CodecCost(size, encode_s * scale, decode_s * scale, tried, total)


def copy_s(numbers: int) -> float:
    """Seconds that it takes to gather so many float32 into one tensor and to put them back."""
    tried = min(numbers, TRIED)
    source, target = torch.zeros(tried), torch.zeros(tried)

    def both() -> None:
        source.copy_(target)
        target.copy_(source)

    return _least_s(both) * numbers / max(1, tried)


def _first(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Parameters from the first on, until there are so many numbers; the last one is cut by rows."""
    chosen: list[Entry] = []
    left = most
    for name, shape in entries:
        numel = torch.Size(shape).numel()
        if numel <= left:
            chosen.append((name, shape))
            left -= numel
        else:
            chosen.append((name, (max(1, left // (numel // shape[0])), *shape[1:])))
            break
    return chosen


def _scaled(num_bytes: int, encoder: Encoder, entries: Sequence[Entry], chosen: Sequence[Entry]) -> int:
    """Small parameters travel in full; the others take as much a number as those that were measured."""

    def split(some: Sequence[Entry]) -> tuple[int, int]:
        sizes = [torch.Size(shape).numel() for _, shape in some]
        coded = sum(size for size in sizes if size >= max(1, encoder.dense_below))
        return coded, sum(sizes) - coded

    (coded, dense), (coded_here, dense_here) = split(entries), split(chosen)
    each = (num_bytes - HEADER_BYTES - 4 * dense_here) / max(1, coded_here)
    return HEADER_BYTES + 4 * dense + round(each * coded)


def _least_s(function: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Of this thread's processor time: what else the machine does is not the codec's."""
    least_s = float("inf")
    for _ in range(REPEATS):
        before()  # the same gradient again would find the residual full of itself
        began_s = time.thread_time()
        function()
        least_s = min(least_s, time.thread_time() - began_s)
    return least_s
