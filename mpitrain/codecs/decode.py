"""Messages back into numbers: one function for every codec.

Law of this file: decoding needs no state, only the layouts that the sender had, and adds, times a weight; so
receivers that add the same messages in the same order hold the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mpitrain.codecs import eightbit, floats, onebit, powersgd, qsgd, topk, wire
from mpitrain.codecs.layout import Part, Plan, plan_of
from mpitrain.codecs.threshold import add_signs
from mpitrain.errors import WireError

Adder = Callable[[wire.Reader, wire.Header, Sequence[Part], Plan, float], None]


def _add_dense(
    reader: wire.Reader, header: wire.Header, parts: Sequence[Part], plan: Plan, weight: float
) -> None:
    for part, start, stop, _ in plan.runs:
        flat = parts[part].flat
        flat[start:stop].add_(reader.tensor(stop - start, "<f4", flat.device), alpha=weight)


_ADDERS: dict[int, Adder] = {
    wire.DENSE: _add_dense,
    wire.FLOAT16: floats.add,
    wire.BFLOAT16: floats.add,
    wire.EIGHTBIT: eightbit.add,
    wire.THRESHOLD: add_signs,
    wire.SPARSE: topk.add,
    wire.SPARSE16: topk.add,
    wire.ONEBIT: onebit.add,
    wire.POWER: powersgd.add,
    wire.QSGD: qsgd.add,
}


@torch.no_grad()
def add_message(message: torch.Tensor, parts: Sequence[Part], weight: float = 1.0) -> None:
    """parts += weight * what `message` (uint8, host memory) says; NaN everywhere where its gradient was not finite.

    Raises:
        WireError: the message is no message, is damaged, or belongs to other layouts.
    """
    header = wire.read_header(message)
    plan = plan_of(parts, header.dense_below)
    if header.num_coded != plan.num_coded:
        raise WireError(f"message of {header.num_coded} coded numbers for a model of {plan.num_coded}")
    if header.kind == wire.POISON:
        for part in parts:
            part.flat.fill_(math.nan)
        return
    reader = wire.Reader(message)
    wire.add_dense(reader, parts, plan, weight)
    _ADDERS[header.kind](reader, header, parts, plan, weight)
    if reader.rest().size:
        raise WireError(f"message of {message.numel()} bytes is longer than what it holds")


def write_message(message: torch.Tensor, parts: Sequence[Part]) -> None:
    """parts = what `message` says."""
    for part in parts:
        part.flat.zero_()
    add_message(message, parts)
