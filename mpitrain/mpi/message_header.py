"""The header of a message: 160 bytes, the same on every machine.

Invariants: a header is believed only when its magic number, its checksum and its place in the
sequence are right. It is small enough to travel eagerly; what follows it (a payload, or a
note's text) has its exact length in it. It is the same for all kinds of messages: `_TABLE` says which of its fields
carry those of which kind, and the others have the values of `_UNUSED`. A bundle's entries travel as its text: for each
one its ranks, its own header and text, and the number of its payload among those that follow.

    magic 4s | kind u8 | finite, stop, pull, final, promoted, standby u8 | leases u8 | - |
    sequence, version, step, samples i64 | checkpoint_at, checkpoint, batches i64 | loss, share f64 | payload bytes i64,
    text bytes, stamp of the payload u32 | 3 x (epoch u32, start i64, count u32, batch size u32) | crc32 u32 | zeros
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from mpitrain import messages
from mpitrain.errors import WireError
from mpitrain.messages import NOT_SENT, CheckpointRequest, Entry, Kind, Lease, Message, Payload

HEADER_BYTES = 160
MAX_TEXT_BYTES = 1 << 20
_MAGIC = b"mpt4"
_FIELDS = struct.Struct("<4sBBBxqqqqqqqddqII" + 3 * "IqII")
_CHECKSUM = struct.Struct("<I")
_MAX_LEASES = 3
_UNNAMED = -1  # `checkpoint_at` of a request that leaves the point to the dealing server
_ENTRY = struct.Struct(
    "<iiii"
)  # of a bundle: from which rank, to which, bytes of text, number of the payload
_NO_PAYLOAD, _NOT_SENT = -1, -2  # instead of that number
assert _FIELDS.size + _CHECKSUM.size <= HEADER_BYTES

# What a header holds, and the value that stands there where a kind does not use it. The last three are not fields of
# their own: `request` is `checkpoint_at` and `final` together, `lease` the only one of `leases`, and `flag` whether
# `checkpoint` is not 0.
_UNUSED: dict[str, Any] = {
    "version": 0, "step": 0, "samples": 0, "checkpoint_at": 0, "checkpoint": 0, "batches": 0, "loss": 0.0, "share": 1.0,
    "finite": True, "stop": False, "pull": True, "final": False, "promoted": False, "standby": False,
    "leases": (), "text": "", "payload": None, "request": None, "lease": None, "flag": False,
    "entries": (),
}  # fmt: skip
_PLACES = {name: place for place, name in enumerate(_UNUSED)}

# For every kind of message: field of the header = field of the message, or one name where both have the same.
_ANSWER = (
    "version step samples payload leases stop batches=num_batches request=checkpoint checkpoint=part_of promoted "
    "standby share=living text=told"
)
_TABLE: dict[type[Message], str] = {
    messages.Join: "step",
    messages.Push: "version step samples payload share loss finite pull lease batches=num_batches request=checkpoint "
    "text=options",
    messages.Pull: "step",
    messages.PullRows: "step payload pull=trains",
    messages.Idle: "step",
    messages.Away: "step standby=for_part",
    messages.Save: "step checkpoint_at=at text",
    messages.Note: "text",
    messages.Done: "step stop=wants_final finite=all_answered request=checkpoint",
    messages.FinalRequest: "step",
    messages.Delivered: "step text",
    messages.Leave: "step checkpoint_at=last_at",
    messages.Lost: "text=how",
    messages.Alive: "",
    messages.Announced: "",
    messages.Reply: _ANSWER,
    messages.Difference: _ANSWER,
    messages.Rows: "version payload",
    messages.Final: "version payload",
    messages.Wake: "stop promoted checkpoint_at=last_at checkpoint=part_of",
    messages.Update: "step version=step payload",
    messages.Sum: "version=meeting step samples=count payload",
    messages.Mean: "version=meeting step payload",
    messages.Ask: "step version=step request=checkpoint",
    messages.Agreed: "step version=step flag=writes final=ends batches=ask_at",
    messages.Last: "step",
    messages.Credit: "step",
    messages.Divide: "step samples=num_units payload",
    messages.Claim: "step samples=number batches=unit payload",
    messages.Over: "step",
    messages.AskAverage: "step",
    messages.Assist: "",
    messages.Unit: "samples=number batches=unit payload",
    messages.Measured: "samples=number batches=unit payload",
    messages.Average: "version payload",
    messages.PartialNorm: "version=update loss=squares",
    messages.Ended: "",
    messages.Ordered: "step=worker version=update text=how",
    messages.Bundle: "entries samples=num_taken",
    messages.Told: "step text",
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


_TEXT, _PAYLOAD, _ENTRIES = _PLACES["text"], _PLACES["payload"], _PLACES["entries"]
_ROWS = {message: _Row(message, text) for message, text in _TABLE.items()}
_BY_KIND = {row.kind: row for row in _ROWS.values() if row.message is not messages.FinalRequest}
_NEED_PAYLOAD = (
    messages.Push, messages.PullRows, messages.Rows, messages.Update, messages.Mean, messages.Divide, messages.Measured,
    messages.Average,
)  # fmt: skip


class OutgoingPayload(NamedTuple):
    """One payload, which has `stamp` at both ends, and is released by so many holders when it has left."""

    payload: Payload
    stamp: int
    num_holders: int


class Outgoing(NamedTuple):
    """What is sent for a message: the header, then the text where there is one, then the payloads."""

    header: bytearray
    text: bytes
    payloads: list[OutgoingPayload]


class Incoming(NamedTuple):
    """What a header announces."""

    kind: Kind
    payload_bytes: int
    text_bytes: int
    stamp: int
    row: _Row
    values: list[Any]

    def message(
        self, text: str = "", payload: Payload | None = None, entries: tuple[Entry, ...] = ()
    ) -> Message:
        """The message, with what came after its header."""
        values = self.values
        values[_TEXT], values[_PAYLOAD], values[_ENTRIES] = text, payload, entries
        return self.row.message(*[values[place] for place in self.row.places])


def encode(message: Message, sequence: int) -> Outgoing:
    """`message`, the `sequence`-th from this rank to that one."""
    values = list(_UNUSED.values())
    for place, get in _ROWS[type(message)].getters:
        values[place] = get(message)
    (
        version, step, samples, checkpoint_at, checkpoint, batches, loss, share, finite, stop, pull, final, promoted,
        standby, leases, text, payload, request, lease, flag, entries,
    ) = values  # fmt: skip
    if request is not None:
        checkpoint_at, final = (_UNNAMED if request.at is None else request.at), request.final
    leases = (lease,) if lease is not None else leases
    assert len(leases) <= _MAX_LEASES, leases
    numbers = [number for lease in leases for number in lease]
    flags = finite | stop << 1 | pull << 2 | final << 3 | promoted << 4 | standby << 5
    encoded = text.encode()
    payloads: list[OutgoingPayload] = []
    stamp = 0 if payload is None else payload.stamp()
    if payload is not None:
        payloads.append(OutgoingPayload(payload, stamp, 1))
    elif entries:
        encoded, payloads = _pack_entries(entries)
    header = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        header, 0, _MAGIC, message.kind, flags, len(leases), sequence, version, step, samples, checkpoint_at,
        checkpoint or flag, batches, loss, share, payload.num_bytes if payload is not None else 0, len(encoded), stamp,
        *numbers, *[0] * (4 * _MAX_LEASES - len(numbers)),
    )  # fmt: skip
    _CHECKSUM.pack_into(header, _FIELDS.size, zlib.crc32(memoryview(header)[: _FIELDS.size]))
    return Outgoing(header, encoded, payloads)


def _pack_entries(entries: tuple[Entry, ...]) -> tuple[bytes, list[OutgoingPayload]]:
    """The entries of a bundle, and their payloads: one that several hold is sent once."""
    packed, payloads = bytearray(), list[OutgoingPayload]()
    numbers: dict[int, int] = {}  # by the payload's identity
    for entry in entries:
        inner, number = encode(entry.message, 0), _NO_PAYLOAD
        for one in inner.payloads:
            number = (
                _NOT_SENT if one.payload is NOT_SENT else numbers.setdefault(id(one.payload), len(payloads))
            )
            if number == len(payloads):
                payloads.append(one._replace(num_holders=0))
            if number >= 0:
                payloads[number] = payloads[number]._replace(num_holders=payloads[number].num_holders + 1)
        packed += _ENTRY.pack(entry.source, entry.to, len(inner.text), number) + inner.header + inner.text
    return bytes(packed), payloads


class IncomingEntry(NamedTuple):
    """One entry of a bundle that has come."""

    source: int
    to: int
    text: str
    number: int  # of its payload
    incoming: Incoming

    def complete(self, payloads: Mapping[int, Any]) -> Entry:
        """The entry, with its payload out of those that came with the bundle."""
        payload = (
            NOT_SENT if self.number == _NOT_SENT else payloads[self.number] if self.number >= 0 else None
        )
        return Entry(self.source, self.to, self.incoming.message(self.text, payload))


def unpack_entries(packed: bytearray, source: int) -> tuple[list[IncomingEntry], list[list[IncomingEntry]]]:
    """The entries of a bundle from rank `source`, and, for each payload that follows, those that hold it.

    Raises:
        WireError: as `decode`, or they do not fit together.
    """
    entries, holders, place = list[IncomingEntry](), list[list[IncomingEntry]](), 0
    while place < len(packed):
        if len(packed) - place < _ENTRY.size + HEADER_BYTES:
            raise WireError(f"rank {source} sent a bundle that ends within an entry")
        sender, to, text_bytes, number = _ENTRY.unpack_from(packed, place)
        place += _ENTRY.size
        incoming = decode(packed[place : place + HEADER_BYTES], 0, source, is_not_sent=number == _NOT_SENT)
        place += HEADER_BYTES
        text = packed[place : place + text_bytes]
        place += text_bytes
        entry = IncomingEntry(sender, to, text.decode(), number, incoming)
        entries.append(entry)
        if number == len(holders):
            holders.append([])
        fits = _NOT_SENT <= number < len(holders) and len(text) == text_bytes == incoming.text_bytes
        fits = fits and (number >= 0) == bool(incoming.payload_bytes) and incoming.kind != Kind.BUNDLE
        if not fits or (number == _NOT_SENT and incoming.kind != Kind.PUSH):
            raise WireError(f"rank {source} sent a bundle whose entry for rank {to} does not fit its header")
        if number >= 0:
            holders[number].append(entry)
            first = holders[number][0].incoming
            if (incoming.payload_bytes, incoming.stamp) != (first.payload_bytes, first.stamp):
                raise WireError(f"rank {source} sent a bundle whose entries differ on a payload")
    return entries, holders


def decode(header: bytearray, sequence: int, source: int, is_not_sent: bool = False) -> Incoming:
    """What is announced by the `sequence`-th header from rank `source`; `is_not_sent`: its payload does not travel.

    Raises:
        WireError: damaged, foreign, out of order, of a kind this version does not know, or without the payload that
            belongs to its kind.
    """
    view = memoryview(header)[: _FIELDS.size]
    (magic, number, flags, num_leases, got, version, step, samples, *rest) = _FIELDS.unpack(view)
    checkpoint_at, checkpoint, batches, loss, share, payload_bytes, text_bytes, stamp, *rest = rest
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
    if not payload_bytes and row.message is messages.Final:
        row = _ROWS[messages.FinalRequest]
    if not payload_bytes and row.message in _NEED_PAYLOAD and not is_not_sent:
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
        leases[0] if leases else None, bool(checkpoint), (),
    ]  # fmt: skip
    return Incoming(row.kind, payload_bytes, text_bytes, stamp, row, values)
