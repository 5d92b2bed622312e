"""The header of a message: 160 bytes, the same on every machine.

Invariants: a header is believed only when its magic number, its checksum and its place in the
sequence are right. It is small enough to travel eagerly; what follows it (a payload, or a
note's text) has its exact length in it.

    magic 4s | kind u8 | finite, stop, pull, final, promoted, standby u8 | leases u8 | - |
    sequence, version, step, samples i64 | checkpoint_at, checkpoint, batches i64 | loss, share f64 | payload bytes,
    text bytes i64 | 3 x (epoch u32, start i64, count u32, batch size u32) | crc32 u32 | zeros
"""

from __future__ import annotations

import struct
import zlib

from mpitrain.effects import Kind, Message
from mpitrain.errors import WireError

HEADER_BYTES = 160
MAX_TEXT_BYTES = 1 << 20
_MAGIC = b"mpt4"
_FIELDS = struct.Struct("<4sBBBxqqqqqqqddqq" + 3 * "IqII")
_CHECKSUM = struct.Struct("<I")
_MAX_LEASES = 3
assert _FIELDS.size + _CHECKSUM.size <= HEADER_BYTES


def encode(message: Message, sequence: int) -> bytearray:
    """The header of `message`, the `sequence`-th from this rank to that one."""
    assert len(message.leases) <= _MAX_LEASES, message.leases
    leases = [number for lease in message.leases for number in lease]
    payload_bytes = message.payload.num_bytes if message.payload is not None else 0
    bits = (message.finite, message.stop, message.pull, message.final, message.promoted, message.standby)
    flags = sum(bit << place for place, bit in enumerate(bits))
    header = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        header, 0, _MAGIC, message.kind, flags, len(message.leases), sequence,
        message.version, message.step, message.samples, message.checkpoint_at, message.checkpoint,
        message.batches,
        message.loss, message.share, payload_bytes, len(message.text.encode()),
        *leases, *[0] * (4 * _MAX_LEASES - len(leases)),
    )  # fmt: skip
    _CHECKSUM.pack_into(header, _FIELDS.size, zlib.crc32(memoryview(header)[: _FIELDS.size]))
    return header


def decode(header: bytearray, sequence: int, source: int) -> tuple[Message, int, int]:
    """The message without its payload, the payload's bytes and the text's bytes.

    Raises:
        WireError: damaged, foreign, out of order, or of a kind this version does not know.
    """
    view = memoryview(header)[: _FIELDS.size]
    (magic, kind, flags, num_leases, got, version, step, samples, *rest) = _FIELDS.unpack(view)
    checkpoint_at, checkpoint, batches, loss, share, payload_bytes, text_bytes, *rest = rest
    (checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    if magic != _MAGIC or checksum != zlib.crc32(view):
        raise WireError(
            f"rank {source} sent a damaged header (magic {magic!r}, checksum {checksum:#010x}): "
            f"{bytes(header).hex()}"
        )
    if got != sequence:
        raise WireError(
            f"rank {source} sent message {got} where {sequence} was due: one was lost or came twice"
        )
    if kind not in Kind._value2member_map_ or num_leases > _MAX_LEASES or text_bytes > MAX_TEXT_BYTES:
        raise WireError(
            f"rank {source} sent kind {kind} with {num_leases} leases and {text_bytes} bytes of "
            "text: another version?"
        )
    leases = tuple(
        (rest[4 * i], rest[4 * i + 1], rest[4 * i + 2], rest[4 * i + 3]) for i in range(num_leases)
    )
    finite, stop, pull, final, promoted, standby = (bool(flags & bit) for bit in (1, 2, 4, 8, 16, 32))
    message = Message(
        Kind(kind), version, step, samples, loss, finite, stop, pull, leases,
        checkpoint_at=checkpoint_at, final=final, checkpoint=checkpoint, batches=batches, promoted=promoted,
        standby=standby, share=share,
    )  # fmt: skip
    return message, payload_bytes, text_bytes
