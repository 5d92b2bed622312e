"""Every class of messages goes into the one header and comes out as it was, in the bytes that it has always had."""

import dataclasses
import typing
from pathlib import Path

import pytest

from mpitrain.errors import WireError
from mpitrain.messages import (
    Bundle,
    CheckpointRequest,
    Final,
    FinalRequest,
    Kind,
    Lease,
    Leave,
    Message,
    Reply,
    Sum,
    Wake,
    payload_bytes,
    payload_of,
)
from mpitrain.mpi.message_header import HEADER_BYTES, decode, encode, unpack_entries
from tests import messages

# The n-th header is that of message n, as it was packed before every kind had a class of its own.
BYTES = dict(
    line.split() for line in (Path(__file__).parent / "message_headers.txt").read_text().splitlines()
)


def carried(message, sequence=0):
    """What arrives of a message."""
    outgoing = encode(message, sequence)
    assert len(outgoing.header) == HEADER_BYTES
    incoming = decode(outgoing.header, sequence, 3)
    assert incoming.kind == message.kind and incoming.text_bytes == len(outgoing.text)
    payloads = [one.payload for one in outgoing.payloads]
    if isinstance(message, Bundle):
        entries, holders = unpack_entries(bytearray(outgoing.text), 3)
        assert [len(held) for held in holders] == [one.num_holders for one in outgoing.payloads]
        stamps = [held[0].incoming.stamp for held in holders]
        assert stamps == [one.stamp for one in outgoing.payloads]
        found = dict(enumerate(payloads))
        return incoming.message(entries=tuple(entry.complete(found) for entry in entries))
    assert [one.stamp for one in outgoing.payloads] in ([], [incoming.stamp])
    assert incoming.payload_bytes == sum(payload.num_bytes for payload in payloads)
    return incoming.message(outgoing.text.decode(), payloads[0] if payloads else None)


def test_there_is_an_example_of_every_class_and_a_class_of_every_kind():
    assert {type(message) for message in messages.MESSAGES} == set(typing.get_args(Message))
    assert {message.kind for message in messages.MESSAGES} == set(Kind)


@pytest.mark.parametrize("message", messages.MESSAGES, ids=messages.name_of)
def test_a_message_arrives_as_it_was_sent(message):
    arrived = carried(message, 12)
    assert arrived == message and type(arrived) is type(message)
    for field in dataclasses.fields(message):
        sent, got = getattr(message, field.name), getattr(arrived, field.name)
        assert type(got) is type(sent), field.name


@pytest.mark.parametrize("message", messages.MESSAGES, ids=messages.name_of)
def test_the_bytes_are_what_they_have_always_been(message):
    name = messages.name_of(message)
    assert encode(message, list(BYTES).index(name)).header.hex() == BYTES[name]


@pytest.mark.parametrize(
    "message",
    [
        Reply(0, 0),
        Leave(9, last_at=96),
        Wake(stop=True, last_at=97, part_of=96),
        Reply(5, 1, 32, leases=(Lease(0, 0, 4),), checkpoint=CheckpointRequest(64, final=True)),
        dataclasses.replace(messages.PUSH, lease=None, checkpoint=None, options=""),
        dataclasses.replace(messages.PUSH, checkpoint=CheckpointRequest(), finite=True, pull=True),
        dataclasses.replace(messages.REPLY, told="[[1, 96, 0.5]]"),
        Sum(0, 3, 0, None),
        dataclasses.replace(messages.SAVE, at=-1),
        dataclasses.replace(messages.SAVE, text="Größe"),
    ],
)
def test_what_is_left_out_is_left_out(message):
    assert carried(message) == message


def test_the_final_model_is_told_from_the_request_for_it_by_its_payload():
    assert Final.kind == FinalRequest.kind == Kind.FINAL
    assert (
        type(carried(Final(3, messages.PAYLOAD))) is Final and type(carried(FinalRequest(3))) is FinalRequest
    )


def test_only_what_carries_a_payload_has_one():
    for message in messages.MESSAGES:
        assert payload_of(message) is getattr(message, "payload", None)


def test_a_header_is_believed_only_when_it_is_whole_and_due():
    header = encode(messages.PUSH, 4).header
    with pytest.raises(WireError, match="rank 3 sent message 4 where 5 was due"):
        decode(header, 5, 3)
    for place in (0, 4, 40, 150, 158):
        damaged = bytearray(header)
        damaged[place] ^= 1
        with pytest.raises(WireError, match="rank 3 sent a damaged header"):
            decode(damaged, 4, 3)


def test_a_bundle_sends_once_what_its_entries_share_and_not_what_is_left_behind():
    payloads = encode(messages.BUNDLE, 0).payloads
    assert [(one.payload.num_bytes, one.num_holders) for one in payloads] == [(640, 1), (4096, 2)]
    assert payload_bytes(messages.BUNDLE) == 640 + 4096


@pytest.mark.parametrize("damage", ["cut", "number", "text"])
def test_a_bundle_is_believed_only_when_its_entries_are_whole(damage):
    packed = bytearray(encode(messages.BUNDLE, 0).text)
    if damage == "cut":
        del packed[-1]
    else:
        packed[12 if damage == "number" else 8] ^= 1
    with pytest.raises(WireError, match="rank 3 sent a bundle"):
        unpack_entries(packed, 3)
