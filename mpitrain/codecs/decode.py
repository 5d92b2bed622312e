"""Messages back into numbers: one function for every codec.

Invariants: decoding needs no state, only the layouts that the sender had, and adds, times a weight; so
receivers that add the same messages in the same order hold the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mpitrain.codecs import eightbit, floats, message_format, onebit, powersgd, qsgd, topk
from mpitrain.codecs.layout import Part, Plan, plan_of
from mpitrain.codecs.threshold import add_signs
from mpitrain.errors import WireError

Adder = Callable[[message_format.Reader, message_format.Header, Sequence[Part], Plan, float], None]


def _add_dense(
    reader: message_format.Reader,
    header: message_format.Header,
    parts: Sequence[Part],
    plan: Plan,
    weight: float,
) -> None:
    for part, start, stop, _ in plan.runs:
        flat = parts[part].flat
        flat[start:stop].add_(reader.tensor(stop - start, "<f4", flat.device), alpha=weight)


_ADDERS: dict[int, Adder] = {
    message_format.DENSE: _add_dense,
    message_format.FLOAT16: floats.add,
    message_format.BFLOAT16: floats.add,
    message_format.EIGHTBIT: eightbit.add,
    message_format.THRESHOLD: add_signs,
    message_format.SPARSE: topk.add,
    message_format.SPARSE16: topk.add,
    message_format.ONEBIT: onebit.add,
    message_format.POWER: powersgd.add,
    message_format.QSGD: qsgd.add,
}


@torch.no_grad()
def add_message(message: torch.Tensor, parts: Sequence[Part], weight: float = 1.0) -> None:
    """parts += weight * what `message` (uint8, host memory) says; NaN everywhere where its gradient was not finite.

    Raises:
        WireError: the message is no message, is damaged, or belongs to other layouts.
    """
    header = message_format.read_header(message)
    plan = plan_of(parts, header.dense_below)
    if header.num_coded != plan.num_coded:
        raise WireError(f"message of {header.num_coded} coded numbers for a model of {plan.num_coded}")
    if header.kind == message_format.POISON:
        for part in parts:
            part.flat.fill_(math.nan)
        return
    reader = message_format.Reader(message)
    message_format.add_dense(reader, parts, plan, weight)
    _ADDERS[header.kind](reader, header, parts, plan, weight)
    if reader.rest().size:
        raise WireError(f"message of {message.numel()} bytes is longer than what it holds")


def write_message(message: torch.Tensor, parts: Sequence[Part]) -> None:
    """parts = what `message` says."""
    for part in parts:
        part.flat.zero_()
    add_message(message, parts)
