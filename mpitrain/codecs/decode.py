"""Messages back into numbers: one function for every codec.

Invariants: decoding needs no state, only the layouts that the sender had, and adds, times a weight; so
receivers that add the same messages in the same order hold the same bits. The kind in a message's header chooses the
decoder, among those of all codecs in the table of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Codec
from mpitrain.codecs.layout import Part, plan_of
from mpitrain.codecs.lazy import torch
from mpitrain.codecs.message_format import Decoder, Header, Received
from mpitrain.errors import WireError
from mpitrain.values import registered


def _add_dense(received: Received) -> None:
    _, reader, parts, plan, weight = received
    for part, start, stop, _ in plan.runs:
        flat = parts[part].flat
        flat[start:stop].add_(reader.tensor(stop - start, "<f4", flat.device), alpha=weight)


def _poison(received: Received) -> None:
    for part in received.parts:
        part.flat.fill_(math.nan)


@cache
def decoders() -> dict[int, Decoder]:
    """The decoder of every kind of message, by its number in the header."""
    found = {message_format.DENSE: Decoder(_add_dense), message_format.POISON: Decoder(_poison)}
    owners = dict.fromkeys(found, "every codec")
    for codec in registered("codec"):
        assert issubclass(codec, Codec)
        for kind, decoder in codec.decoders.items():
            assert kind not in found, f"{codec.name} and {owners[kind]} both have messages of kind {kind}"
            found[kind], owners[kind] = decoder, codec.name
    return found


def _decoder(header: Header) -> Decoder:
    if header.kind not in decoders():
        raise WireError(f"no codec has compressed messages of kind {header.kind}")
    return decoders()[header.kind]


def message_statistics(message: torch.Tensor) -> dict[str, float]:
    """What a message says of itself: bytes, density (share of the coded numbers that it holds) and, where its codec
    names it, the scale (tau).

    Raises:
        WireError: these bytes are no message.
    """
    header = message_format.read_header(message)
    decoder = _decoder(header)
    share = header.num_sent / max(1, header.num_coded) if decoder.is_sparse else 1.0
    if header.kind == message_format.POISON:
        share = 0.0
    scale = {decoder.scale: header.scale} if decoder.scale else {}
    return {"density": share, "bytes": float(message.numel()), **scale}


def add_message(message: torch.Tensor, parts: Sequence[Part], weight: float = 1.0) -> None:
    """parts += weight * what `message` (uint8, host memory) says; NaN everywhere where its gradient was not finite.

    Raises:
        WireError: the message is no message, is damaged, or belongs to other layouts.
    """
    header = message_format.read_header(message)
    decoder = _decoder(header)
    plan = plan_of(parts, header.dense_below)
    if header.num_coded != plan.num_coded:
        raise WireError(f"message of {header.num_coded} coded numbers for a model of {plan.num_coded}")
    received = Received(header, message_format.Reader(message), parts, plan, weight)
    with torch.no_grad():
        if header.kind != message_format.POISON:
            message_format.add_dense(received)
        decoder.add(received)
    if received.reader.rest().size:
        raise WireError(f"message of {message.numel()} bytes is longer than what it holds")


def write_message(message: torch.Tensor, parts: Sequence[Part]) -> None:
    """parts = what `message` says."""
    for part in parts:
        part.flat.zero_()
    add_message(message, parts)
