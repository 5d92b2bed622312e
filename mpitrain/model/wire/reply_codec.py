"""Replies through a codec: what has changed in a shard since a worker's last reply.

    server:  q = C(w - what);  what <- what + D(q)          worker:  what <- what + D(q), and computes on it

Invariants: server and worker hold the same copy `what`, to the bit, because both add the same message to it; what
a message does not say stays in the next difference by itself, so no residual is kept. The first message to a worker
of a process says the copy in full.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from mpitrain.codecs import Encoder, Part, add_message
from mpitrain.codecs.base import Codec
from mpitrain.model.copies import copied
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.model.wire.codec_registry import make_encoder
from mpitrain.model.wire.flat import Layout
from mpitrain.model.wire.push_codec import fields_of
from mpitrain.system import trace


class ReplyCoder:
    """The server's side of one shard: a copy and an encoder for every worker.

    Args:
        layout: of the flat vector; shard: which part of it; codec: any but `none`.
    """

    def __init__(self, layout: Layout, shard: int, codec: Codec):
        self.codec, self.fields = codec, fields_of(layout, shard)
        self._copies: dict[int, torch.Tensor] = {}
        self._encoders: dict[int, Encoder] = {}
        self._met: set[int] = set()  # workers that hold their copy
        self.num_messages, self.codec_s = 0, 0.0
        trace.watch(self, encode=("encode the reply", trace.CODEC))

    @torch.no_grad()
    def encode(self, worker: int, now: torch.Tensor) -> VariableBuffer:
        """The message that brings `worker`'s copy nearer to `now`."""
        began_s = time.perf_counter()
        message = self._advance(worker, now)
        if worker not in self._met:
            self._met.add(worker)
            message = make_encoder(self.codec).encode([Part(self._copies[worker], self.fields)], dense=True)
        self.num_messages += 1
        self.codec_s += time.perf_counter() - began_s
        return VariableBuffer(message)

    def _advance(self, worker: int, now: torch.Tensor) -> torch.Tensor:
        if worker not in self._copies:
            self._copies[worker] = now.clone()
            self._encoders[worker] = make_encoder(self.codec, worker=worker)
            return torch.zeros(0, dtype=torch.uint8)
        encoder, copy = self._encoders[worker], self._copies[worker]
        if encoder.residual:
            encoder.memory.clear(encoder.residual)
        message = encoder.encode([Part(now - copy, self.fields)])
        add_message(message, [Part(copy, self.fields)])
        return message

    def held(self, worker: int) -> torch.Tensor:
        """The parameters that `worker` computes on after its last message: its copy, not the version itself."""
        return self._copies[worker]

    def statistics(self) -> dict[str, float]:
        """Milliseconds a reply took to code; empty before the first."""
        return {"reply_codec_ms": 1e3 * self.codec_s / self.num_messages} if self.num_messages else {}

    def state(self) -> dict[str, Any]:
        """Copies and encoders by worker; without what is kept, for nothing is."""
        encoders = {str(worker): encoder.state() for worker, encoder in self._encoders.items()}
        for saved in encoders.values():
            saved["tensors"] = {
                key: value for key, value in saved["tensors"].items() if key.startswith("basis/")
            }
        copies = {str(worker): copied(copy) for worker, copy in self._copies.items()}
        return {"copies": copies, "encoders": encoders}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; all workers are new, and are sent their copies in full."""
        self._met.clear()
        self._copies = {int(worker): copy.clone() for worker, copy in state["copies"].items()}
        self._encoders = {}
        for worker, saved in state["encoders"].items():
            self._encoders[int(worker)] = make_encoder(self.codec, worker=int(worker))
            self._encoders[int(worker)].restore(saved)


class ReplyReader:
    """The worker's side: its copy of every shard, in wire buffers."""

    def __init__(self, layout: Layout):
        self._fields = [fields_of(layout, shard) for shard in range(layout.num_shards)]
        self._copies = [FixedBuffer(layout.size(shard), layout.dtype) for shard in range(layout.num_shards)]
        trace.watch(self, take=("decode the reply", trace.CODEC))

    @torch.no_grad()
    def take(self, shard: int, payload: FixedBuffer | VariableBuffer) -> FixedBuffer:
        """The copy after this message, held once more; anything but a message is handed back as it is."""
        if not isinstance(payload, VariableBuffer):
            return payload
        copy = self._copies[shard]
        add_message(payload.body, [Part(copy.body, self._fields[shard])])
        payload.release()
        return copy.hold()
