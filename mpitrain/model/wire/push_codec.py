"""Pushes through a codec: a worker's gradients become one message a shard, and what was not sent stays here.

Invariants: every shard has an encoder of its own (a threshold of its own, too), whose fields are the parameters
that lie in the shard; one that straddles a cut is two fields, `name[start:stop]`. So what all shards are sent and what
is kept add up to the gradients, and residuals can be saved by parameter and cut anew. A gradient that is flagged as not
finite is refused by the server as a whole, so nothing of it enters a residual here. Clipping is by the norm of the
whole gradient, over all shards.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.codecs import Encoder, Field, Part, add_message
from mpitrain.codecs import Layout as Fields
from mpitrain.codecs.base import Codec
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of, merge_states
from mpitrain.model.wire.flat import Layout
from mpitrain.system import trace

_PIECE = re.compile(r"(.*)\[(\d+):(\d+)\]")


def fields_of(layout: Layout, shard: int) -> Fields:
    """What lies in a shard, as a codec sees it."""
    entries = []
    for index, start, stop, _ in layout.pieces(shard):
        name, shape = layout.names[index], layout.shapes[index]
        is_whole = stop - start == torch.Size(shape).numel()
        entries.append((name, shape) if is_whole else (f"{name}[{start}:{stop}]", (stop - start,)))
    return make_layout_of(entries)


class PushCoder:
    """One worker's encoders, one a shard.

    Args:
        layout: of the flat vector; codec: any but `none`.
        num_contributors: gradients in the mean of one update; worker, seed: key of the randomness.
    """

    def __init__(self, layout: Layout, codec: Codec, num_contributors: int, worker: int, seed: int):
        self.layout, self.num_contributors = layout, num_contributors
        self.clip = float(getattr(codec, "clip", 0.0))
        self.fields = [fields_of(layout, shard) for shard in range(layout.num_shards)]
        self.encoders: list[Encoder] = [
            make_encoder(codec, num_contributors, worker, seed) for _ in self.fields
        ]
        for encoder in self.encoders:
            encoder.clip = 0.0  # it sees one shard only
        self.num_steps, self.sent_bytes, self.codec_s = 0, 0, 0.0
        trace.watch(self, encode=("encode", trace.CODEC))

    @torch.no_grad()
    def encode(self, wire_buffers: Sequence[FixedBuffer], finite: bool) -> list[VariableBuffer]:
        """One message for every shard's wire buffer, which is released."""
        began_s = time.perf_counter()
        if not finite:
            for wire_buffer in wire_buffers:
                wire_buffer.body.fill_(math.nan)
        elif self.clip:
            norm = math.hypot(
                *(float(torch.linalg.vector_norm(wire_buffer.body)) for wire_buffer in wire_buffers)
            )
            limit = self.clip / math.sqrt(self.num_contributors)
            for wire_buffer in wire_buffers if norm > limit else ():
                wire_buffer.body.mul_(limit / norm)
        wire_messages = []
        for encoder, fields, wire_buffer in zip(self.encoders, self.fields, wire_buffers, strict=True):
            wire_messages.append(VariableBuffer(encoder.encode([Part(wire_buffer.body, fields)])))
            wire_buffer.release()
        self.num_steps += 1
        self.sent_bytes += sum(wire_message.num_bytes for wire_message in wire_messages)
        self.codec_s += time.perf_counter() - began_s
        return wire_messages

    def statistics(self) -> dict[str, float]:
        """Density and tau of the last messages (means over shards, by their numbers), the norm of what is kept now,
        bytes and milliseconds a push."""
        total, found = self.layout.cuts[-1], dict[str, float]()
        for shard, encoder in enumerate(self.encoders):
            share = self.layout.size(shard) / total
            for key, value in encoder.statistics().items():
                found[key] = found.get(key, 0.0) + value * (1.0 if key == "bytes" else share)
        steps = max(1, self.num_steps)
        norms = [encoder.residual_norm() for encoder in self.encoders if encoder.residual]
        kept = {"residual_norm": math.hypot(*norms)} if norms else {}
        return found | kept | {"mean_bytes": self.sent_bytes / steps, "codec_ms": 1e3 * self.codec_s / steps}

    def state(self) -> dict[str, Any]:
        """Every encoder's state, and where the vector was cut."""
        return {
            "cuts": list(self.layout.cuts), "contributors": self.num_contributors,
            "shards": [encoder.state() for encoder in self.encoders],
        }  # fmt: skip

    def restore(self, states: Sequence[dict[str, Any]], first: dict[str, Any] | None = None) -> None:
        """Continue from what the workers of `states` had, of which any number may fall to this one, and what all share
        from `first`. The sum of what was kept, over the gradients of an update, stays what it was."""
        if not (first := first or (states[0] if states else None)):
            return
        factor = self.num_contributors / first["contributors"]
        shared = self._recut(first)
        kept = [self._recut(state) for state in states]
        for shard, encoder in enumerate(self.encoders):
            encoder.restore(merge_states(shared[shard], [each[shard] for each in kept], factor))

    def _recut(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The states of the shards as they are cut here; tau and the like then are the first shard's."""
        shards: list[dict[str, Any]] = state["shards"]
        if tuple(state["cuts"]) == self.layout.cuts:
            return shards
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        flats: dict[str, torch.Tensor] = {}  # slot/parameter
        others: dict[str, torch.Tensor] = {}  # not by number: PowerSGD's bases
        for saved in shards:
            for key, tensor in saved["tensors"].items():
                slot, name = key.split("/", 1)
                piece = _PIECE.fullmatch(name)
                base, start = (piece[1], int(piece[2])) if piece else (name, 0)
                if slot == "basis":
                    others[key] = tensor
                    continue
                if f"{slot}/{base}" not in flats:
                    flats[f"{slot}/{base}"] = torch.zeros(torch.Size(shapes[base]).numel())
                flats[f"{slot}/{base}"][start : start + tensor.numel()] = tensor.reshape(-1)
        return [
            {**shards[0], "tensors": _cut(flats, fields) | _named(others, fields)} for fields in self.fields
        ]


def _cut(flats: dict[str, torch.Tensor], fields: Fields) -> dict[str, torch.Tensor]:
    found = {}
    slots = {key.split("/", 1)[0] for key in flats}
    for field in fields:
        piece = _PIECE.fullmatch(field.name)
        base, start = (piece[1], int(piece[2])) if piece else (field.name, 0)
        for slot in slots:
            if (flat := flats.get(f"{slot}/{base}")) is not None:
                found[f"{slot}/{field.name}"] = flat[start : start + field.numel].clone().view(field.shape)
    return found


def _named(tensors: dict[str, torch.Tensor], fields: Fields) -> dict[str, torch.Tensor]:
    names = {field.name for field in fields}
    return {key: tensor for key, tensor in tensors.items() if key.split("/", 1)[1] in names}


class PushDecoder:
    """The server's side of one shard: messages into full numbers."""

    def __init__(self, layout: Layout, shard: int):
        self.fields: tuple[Field, ...] = fields_of(layout, shard)
        self.num_messages, self.codec_s = 0, 0.0
        trace.watch(self, add=("decode", trace.CODEC))

    def wire_buffer(self) -> VariableBuffer:
        """Where a push is to be received."""
        return VariableBuffer()

    @torch.no_grad()
    def add(self, payload: VariableBuffer, into: torch.Tensor) -> None:
        """into += the message; the payload is released."""
        began_s = time.perf_counter()
        add_message(payload.body, [Part(into, self.fields)])
        payload.release()
        self.num_messages += 1
        self.codec_s += time.perf_counter() - began_s

    def statistics(self) -> dict[str, float]:
        """Milliseconds a message took to decode."""
        return {"decode_ms": 1e3 * self.codec_s / max(1, self.num_messages)}
