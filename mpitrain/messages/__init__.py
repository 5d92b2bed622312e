"""The messages between roles: one class for each kind, with only the fields that this kind carries.

Invariants: a message never changes. How it travels is up to the world: `mpi/message_header.py` maps every class to the
fields of one header, a virtual world hands over the object. A payload is opaque here: a world keeps it until it has
been sent, then calls its `release()`; what a role receives it must release itself when it is done with it.

Samples are counted as accepted by the dealing server, the server that deals the batches. A worker's `step` is how many
pushes it has made, so it numbers its pushes from 0.
"""

from __future__ import annotations

from mpitrain.messages.bundles import NOT_SENT as NOT_SENT
from mpitrain.messages.bundles import Bundle as Bundle
from mpitrain.messages.bundles import Entry as Entry
from mpitrain.messages.common import CheckpointRequest as CheckpointRequest
from mpitrain.messages.common import Kind as Kind
from mpitrain.messages.common import Lease as Lease
from mpitrain.messages.common import Payload as Payload
from mpitrain.messages.common import num_parts as num_parts
from mpitrain.messages.servers import Ended as Ended
from mpitrain.messages.servers import Ordered as Ordered
from mpitrain.messages.servers import PartialNorm as PartialNorm
from mpitrain.messages.training import Agreed as Agreed
from mpitrain.messages.training import Alive as Alive
from mpitrain.messages.training import Announced as Announced
from mpitrain.messages.training import Answer as Answer
from mpitrain.messages.training import Ask as Ask
from mpitrain.messages.training import Away as Away
from mpitrain.messages.training import Credit as Credit
from mpitrain.messages.training import Delivered as Delivered
from mpitrain.messages.training import Difference as Difference
from mpitrain.messages.training import Done as Done
from mpitrain.messages.training import Final as Final
from mpitrain.messages.training import FinalRequest as FinalRequest
from mpitrain.messages.training import Idle as Idle
from mpitrain.messages.training import Join as Join
from mpitrain.messages.training import Last as Last
from mpitrain.messages.training import Leave as Leave
from mpitrain.messages.training import Lost as Lost
from mpitrain.messages.training import Mean as Mean
from mpitrain.messages.training import Note as Note
from mpitrain.messages.training import Pull as Pull
from mpitrain.messages.training import PullRows as PullRows
from mpitrain.messages.training import Push as Push
from mpitrain.messages.training import Reply as Reply
from mpitrain.messages.training import Rows as Rows
from mpitrain.messages.training import Save as Save
from mpitrain.messages.training import Sum as Sum
from mpitrain.messages.training import Update as Update
from mpitrain.messages.training import Wake as Wake
from mpitrain.messages.validation import AskAverage as AskAverage
from mpitrain.messages.validation import Assist as Assist
from mpitrain.messages.validation import Average as Average
from mpitrain.messages.validation import Claim as Claim
from mpitrain.messages.validation import Divide as Divide
from mpitrain.messages.validation import Measured as Measured
from mpitrain.messages.validation import Over as Over
from mpitrain.messages.validation import Told as Told
from mpitrain.messages.validation import Unit as Unit

ToServer = (
    Join
    | Push
    | Pull
    | PullRows
    | Idle
    | Away
    | Save
    | Note
    | Done
    | FinalRequest
    | Delivered
    | Leave
    | Lost
    | Alive
    | Announced
    | Divide
    | Claim
    | Over
    | AskAverage
    | Told
)
ToWorker = Reply | Difference | Rows | Final | Wake | Alive | Assist | Unit | Measured | Average
AmongPeers = Update | Sum | Mean | Ask | Agreed | Last | Credit | Told
AmongServers = PartialNorm | Ordered | Ended
Message = ToServer | ToWorker | AmongPeers | AmongServers | Bundle


_WITH_PAYLOAD = (
    Push | PullRows | Answer | Rows | Final | Update | Sum | Mean | Divide | Claim | Unit | Measured | Average
)


def payload_of(message: Message) -> Payload | None:
    """The payload of a message that carries one."""
    return message.payload if isinstance(message, _WITH_PAYLOAD) else None


def pushes_of(source: int, message: Message) -> list[tuple[int, Push]]:
    """The pushes in a message from `source`, each with the worker that has made it."""
    if not isinstance(message, Bundle):
        return [(source, message)] if isinstance(message, Push) else []
    return [(entry.source, entry.message) for entry in message.entries if isinstance(entry.message, Push)]


def payloads_of(message: Message) -> list[Payload]:
    """The payloads of a message, or of all messages of a bundle; one that several share comes once for each."""
    inside = [entry.message for entry in message.entries] if isinstance(message, Bundle) else [message]
    return [payload for one in inside if (payload := payload_of(one)) is not None]


def payload_bytes(message: Message) -> int:
    """Of all payloads; one that several share is counted once."""
    if not isinstance(message, Bundle):
        return payload.num_bytes if (payload := payload_of(message)) is not None else 0
    return sum({id(payload): payload.num_bytes for payload in payloads_of(message)}.values())


def release(message: Message) -> None:
    """Release what the message carries, which nobody will use."""
    for payload in payloads_of(message):
        payload.release()
