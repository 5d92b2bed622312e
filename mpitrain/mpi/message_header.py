"""The header of a message: 160 bytes, the same on every machine.

Invariants: a header is believed only when its magic number, its checksum and its place in the
sequence are right. It is small enough to travel eagerly; what follows it (a payload, or a
note's text) has its exact length in it. It is the same for all kinds of messages: `_TABLE` says which of its fields
carry those of which kind, and the others have the values of `_UNUSED`.

    magic 4s | kind u8 | finite, stop, pull, final, promoted, standby u8 | leases u8 | - |
    sequence, version, step, samples i64 | checkpoint_at, checkpoint, batches i64 | loss, share f64 | payload bytes,
    text bytes i64 | 3 x (epoch u32, start i64, count u32, batch size u32) | crc32 u32 | zeros
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from mpitrain.errors import WireError
from mpitrain.messages import (
    Agreed,
    Alive,
    Ask,
    AskAverage,
    Assist,
    Average,
    Away,
    CheckpointRequest,
    Claim,
    Credit,
    Delivered,
    Difference,
    Divide,
    Done,
    Ended,
    Final,
    FinalRequest,
    Idle,
    Join,
    Kind,
    Last,
    Lease,
    Leave,
    Lost,
    Mean,
    Measured,
    Message,
    Note,
    Ordered,
    Over,
    PartialNorm,
    Payload,
    Pull,
    PullRows,
    Push,
    Reply,
    Rows,
    Save,
    Sum,
    Unit,
    Update,
    Wake,
)

HEADER_BYTES = 160
MAX_TEXT_BYTES = 1 << 20
_MAGIC = b"mpt4"
_FIELDS = struct.Struct("<4sBBBxqqqqqqqddqq" + 3 * "IqII")
_CHECKSUM = struct.Struct("<I")
_MAX_LEASES = 3
_UNNAMED = -1  # `checkpoint_at` of a request that leaves the point to the dealing server
assert _FIELDS.size + _CHECKSUM.size <= HEADER_BYTES

# What a header holds, and the value that stands there where a kind does not use it. The last three are not fields of
# their own: `request` is `checkpoint_at` and `final` together, `lease` the only one of `leases`, and `flag` whether
# `checkpoint` is not 0.
_UNUSED: dict[str, Any] = {
    "version": 0, "step": 0, "samples": 0, "checkpoint_at": 0, "checkpoint": 0, "batches": 0, "loss": 0.0, "share": 1.0,
    "finite": True, "stop": False, "pull": True, "final": False, "promoted": False, "standby": False,
    "leases": (), "text": "", "payload": None, "request": None, "lease": None, "flag": False,
}  # fmt: skip
_PLACES = {name: place for place, name in enumerate(_UNUSED)}

# For every kind of message: field of the header = field of the message, or one name where both have the same.
_ANSWER = (
    "version step samples payload leases stop batches=num_batches request=checkpoint checkpoint=part_of promoted "
    "standby"
)
_TABLE: dict[type[Message], str] = {
    Join: "step",
    Push: "version step samples payload share loss finite pull lease batches=num_batches request=checkpoint "
    "text=options",
    Pull: "step",
    PullRows: "step payload pull=trains",
    Idle: "step",
    Away: "step standby=for_part",
    Save: "step checkpoint_at=at text",
    Note: "text",
    Done: "step stop=wants_final finite=all_answered request=checkpoint",
    FinalRequest: "step",
    Delivered: "step text",
    Leave: "step",
    Lost: "text=how",
    Alive: "",
    Reply: _ANSWER,
    Difference: _ANSWER,
    Rows: "version payload",
    Final: "version payload",
    Wake: "stop promoted",
    Update: "step version=step payload",
    Sum: "version=meeting step samples=count payload",
    Mean: "version=meeting step payload",
    Ask: "step version=step request=checkpoint",
    Agreed: "step version=step flag=writes final=ends batches=ask_at",
    Last: "step",
    Credit: "step",
    Divide: "step samples=num_units payload",
    Claim: "step samples=number batches=unit payload",
    Over: "step",
    AskAverage: "step",
    Assist: "",
    Unit: "samples=number batches=unit payload",
    Measured: "samples=number batches=unit payload",
    Average: "version payload",
    PartialNorm: "version=update loss=squares",
    Ended: "",
    Ordered: "step=worker text=how",
}


class _Row:
    """How one class of messages lies in the header."""

    def __init__(self, message: type[Message], text: str):
        self.message = message
        self.kind = message.kind
        cells = [(cell.partition("=")[0], cell.partition("=")[2] or cell) for cell in text.split()]
        self.getters = [(_PLACES[ours], attrgetter(theirs)) for ours, theirs in cells]
        places = {theirs: _PLACES[ours] for ours, theirs in reversed(cells)}  # of two, the first
        assert sorted(places) == sorted(field.name for field in fields(message)), message
        self.places = [places[field.name] for field in fields(message)]


_TEXT, _PAYLOAD = _PLACES["text"], _PLACES["payload"]
_ROWS = {message: _Row(message, text) for message, text in _TABLE.items()}
_BY_KIND = {row.kind: row for row in _ROWS.values() if row.message is not FinalRequest}
_NEED_PAYLOAD = (Push, PullRows, Rows, Update, Mean, Divide, Measured, Average)


class Outgoing(NamedTuple):
    """What is sent for a message: the header, the text and the payload where there are any, the payload with `stamp`
    at both ends."""

    header: bytearray
    text: bytes
    payload: Payload | None
    stamp: int


class Incoming(NamedTuple):
    """What a header announces."""

    kind: Kind
    payload_bytes: int
    text_bytes: int
    stamp: int
    row: _Row
    values: list[Any]

    def message(self, text: str = "", payload: Payload | None = None) -> Message:
        """The message, with what came after its header."""
        values = self.values
        values[_TEXT], values[_PAYLOAD] = text, payload
        return self.row.message(*[values[place] for place in self.row.places])


def encode(message: Message, sequence: int) -> Outgoing:
    """`message`, the `sequence`-th from this rank to that one."""
    values = list(_UNUSED.values())
    for place, get in _ROWS[type(message)].getters:
        values[place] = get(message)
    (
        version, step, samples, checkpoint_at, checkpoint, batches, loss, share, finite, stop, pull, final, promoted,
        standby, leases, text, payload, request, lease, flag,
    ) = values  # fmt: skip
    if request is not None:
        checkpoint_at, final = (_UNNAMED if request.at is None else request.at), request.final
    leases = (lease,) if lease is not None else leases
    assert len(leases) <= _MAX_LEASES, leases
    numbers = [number for lease in leases for number in lease]
    flags = finite | stop << 1 | pull << 2 | final << 3 | promoted << 4 | standby << 5
    encoded = text.encode()
    header = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        header, 0, _MAGIC, message.kind, flags, len(leases), sequence, version, step, samples, checkpoint_at,
        checkpoint or flag, batches, loss, share, payload.num_bytes if payload is not None else 0, len(encoded),
        *numbers, *[0] * (4 * _MAX_LEASES - len(numbers)),
    )  # fmt: skip
    _CHECKSUM.pack_into(header, _FIELDS.size, zlib.crc32(memoryview(header)[: _FIELDS.size]))
    return Outgoing(header, encoded, payload, _stamp(message.kind, version, step))


def decode(header: bytearray, sequence: int, source: int) -> Incoming:
    """What is announced by the `sequence`-th header from rank `source`.

    Raises:
        WireError: damaged, foreign, out of order, of a kind this version does not know, or without the payload that
            belongs to its kind.
    """
    view = memoryview(header)[: _FIELDS.size]
    (magic, number, flags, num_leases, got, version, step, samples, *rest) = _FIELDS.unpack(view)
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
    row = _BY_KIND.get(number)
    if row is None or num_leases > _MAX_LEASES or text_bytes > MAX_TEXT_BYTES:
        raise WireError(
            f"rank {source} sent kind {number} with {num_leases} leases and {text_bytes} bytes of "
            "text: another version?"
        )
    if not payload_bytes and row.message is Final:
        row = _ROWS[FinalRequest]
    if not payload_bytes and row.message in _NEED_PAYLOAD:
        raise WireError(
            f"rank {source} sent {row.kind.name} (step {step}, version {version}) without the payload that belongs to "
            "it; start all ranks with the same version of mpitrain"
        )
    leases = tuple([Lease(*rest[4 * i : 4 * i + 4]) for i in range(num_leases)]) if num_leases else ()
    final, request = bool(flags & 8), None
    if checkpoint_at or final:
        request = CheckpointRequest(None if checkpoint_at == _UNNAMED else checkpoint_at, final)
    values = [
        version, step, samples, checkpoint_at, checkpoint, batches, loss, share, bool(flags & 1), bool(flags & 2),
        bool(flags & 4), final, bool(flags & 16), bool(flags & 32), leases, "", None, request,
        leases[0] if leases else None, bool(checkpoint),
    ]  # fmt: skip
    stamp = _stamp(row.kind, version, step)
    return Incoming(row.kind, payload_bytes, text_bytes, stamp, row, values)


def _stamp(kind: Kind, version: int, step: int) -> int:
    """What a payload bears at both ends, so that a torn one is known."""
    return step if kind == Kind.PUSH else version
