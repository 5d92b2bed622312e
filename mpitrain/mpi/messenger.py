"""What a rank's role sends and is sent, as nonblocking Isend and Irecv: a header, a text, payloads.

Invariants: everything here runs in the thread that drives MPI.
Where the job may go on without ranks that die, one header receive is always listening to each peer (directed, never
ANY_SOURCE: a dead peer must be tellable), and every completion is looked for among all of them; so, too, where the MPI
library does not keep to ANY_SOURCE (`runtime.py`). Everywhere else one receive listens to all peers, so that a
completion costs as much among ten thousand peers as among two. What a header
announces is then received into the wire buffer that `buffer_for` provides, and only after that the peer's next header
is looked at, so messages of one peer keep their order. The payload of a push is received when there is room for it
(`pushes_at_senders.py`), and stays with its sender until then. MPI counts in 31 bits, so a payload travels in pieces of
`Messenger.piece_bytes`, which all ranks have in common. A payload whose length or whose stamps at the two ends are not
what its header says is an error, never an update.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.errors import WireError
from mpitrain.messages import Announced, Kind, Lost, Message, Push, release
from mpitrain.messages.steps import is_progress, step_after
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.errors import is_dead_peer
from mpitrain.mpi.faults.late_reads import LateReads
from mpitrain.mpi.message_header import (
    HEADER_BYTES,
    Incoming,
    IncomingEntry,
    OutgoingPayload,
    decode,
    encode,
    unpack_entries,
)
from mpitrain.mpi.operation import Op, message_of, messages_of_wire
from mpitrain.mpi.pushes_at_senders import PushesAtSenders
from mpitrain.system.launched.ranks import Ends

HEADER_TAG, PAYLOAD_TAG = 11, 12


class Peer:
    """What is known of one other rank: how many messages went each way."""

    def __init__(self, rank: int):
        self.rank = rank
        self.num_sent = self.num_received = 0
        self.num_unsent = 0
        self.listening: Op | None = None
        self.lost = False
        self.given_up = False  # but may speak again
        self.header = bytearray(HEADER_BYTES)
        self.receives = False  # a message of which the header is here
        self.headers: deque[bytearray] = deque()  # that came meanwhile


class Messenger:
    """Sends and receives the messages of the role of this rank.

    `inbox` holds what has arrived, with its source; `error` is what ends the role.

    Args:
        engine: the process's progress engine.
        peers: ranks that messages are exchanged with.
        buffer_for: `buffer_for(source, kind) -> wire_buffer` to receive the payload of that rank's next message into.
        on_step: called with the role's step as it changes, for error messages.
        ends: of peers, and of the role.
        answer: `answer(source, message)` answers a given up peer that speaks after the role has ended.
        room_bytes: of pushes that are received or wait in `inbox`; one has room however large it is.
    """

    piece_bytes = 1 << 30  # of a payload, in one message of MPI

    def __init__(
        self,
        engine: Engine,
        peers: tuple[int, ...],
        buffer_for: Callable[[int, Kind], Any],
        on_step: Callable[[int], None],
        ends: Ends,
        answer: Callable[[int, Message], None] | None,
        room_bytes: float = math.inf,
    ):
        self.engine, self.buffer_for, self.on_step = engine, buffer_for, on_step
        self.inbox: deque[tuple[int, Message]] = deque()
        self.error: BaseException | None = None
        self.late = LateReads()
        self.tear_next = False  # as injected: the stamps of the next payload are to differ
        self._peers = {rank: Peer(rank) for rank in peers}
        self._ends, self._answer_late = ends, answer
        self._pushes = PushesAtSenders(room_bytes)
        self._is_over = False
        self._to_any: Op | None = None  # the receive that listens to all peers
        self._any_header = bytearray(HEADER_BYTES)
        self._step = 0  # of the role, by the messages that it has sent

    def start(self) -> None:
        """Listen to every peer."""
        if self._peers and not self.engine.listens_to_each:
            self._listen_to_any()
            return
        for peer in self._peers.values():
            self._listen(peer)

    def poll(self) -> int:
        """Let MPI move what is under way, and receive what has waited long enough."""
        while (late := self.late.take()) is not None:
            self._receive_announced(*late)
        return self.engine.poll()

    def wait_once(self, predicate: Callable[[], Any], end_s: float | None) -> bool:
        """Wait until `predicate()` holds, something is wrong or the time is up, or something is announced that is to
        be read late, or it is time to."""
        num_late = len(self.late)
        with contextlib.suppress(TimeoutError):
            self.engine.wait_any(
                lambda: predicate() or self.error or len(self.late) > num_late, self.late.left_s(end_s)
            )
        return bool(predicate() or self.error)

    def open_to(self, upto: int | None) -> None:
        """For whose pushes the role has room, as in `Recv`; asked before it waits."""
        self._pushes.upto = upto
        if self._pushes:
            self._let_in()

    def take(self) -> tuple[int, Message]:
        """The message that has come first; its place another one takes."""
        arrived = self.inbox.popleft()
        if type(arrived[1]) is Push:
            self._pushes.taken(arrived[1].payload.num_bytes)
            self._let_in()
        return arrived

    def send(self, rank: int, message: Message) -> None:
        """Have a message leave for a peer; one that is lost is sent nothing."""
        peer = self._peers[rank]
        if peer.lost:
            release(message)
            return
        if is_progress(message):
            self._step = step_after(message, self._step)
            self.on_step(self._step)
        outgoing = encode(message, peer.num_sent)
        peer.num_sent += 1
        self._isend(outgoing.header, peer.rank, HEADER_TAG)
        if outgoing.text:
            self._isend(bytearray(outgoing.text), peer.rank, PAYLOAD_TAG)
        for one in outgoing.payloads:
            self._send_payload(peer, one)

    def _send_payload(self, peer: Peer, outgoing: OutgoingPayload) -> None:
        payload: Any = outgoing.payload
        pieces = messages_of_wire(payload, self.piece_bytes)
        if self.tear_next:
            torn = payload.raw.clone()  # others may hold the payload
            torn[:8].zero_().sub_(1)
            pieces = [message_of(one) for one in torn.split(self.piece_bytes)]
            self.tear_next = False
        num_left = len(pieces)

        leaving = self._pushes.leaving
        leaving.begin(id(payload), payload.num_bytes)

        def sent() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                leaving.end(id(payload))
                self._let_in()
                for _ in range(outgoing.num_holders):
                    payload.release()

        for piece in pieces:
            self._isend(piece, peer.rank, PAYLOAD_TAG, sent)

    def _isend(self, buffer: Any, rank: int, tag: int, sent: Callable[[], None] = lambda: None) -> Op:
        peer = self._peers[rank]
        peer.num_unsent += 1

        def on_done(op: Op) -> None:
            peer.num_unsent -= 1
            if op.error is not None:
                self._fail(peer, op.error)
            sent()

        return self.engine.isend(buffer, rank, tag).then(on_done)

    def _listen(self, peer: Peer) -> None:
        if self._is_over and not self._hears_late(peer):
            return
        op = self.engine.irecv(peer.header, peer.rank, HEADER_TAG, passive=True)
        peer.listening = op
        op.then(lambda op: self._on_header(peer, op))

    def _listen_to_any(self) -> None:
        if self._is_over and not any(self._hears_late(peer) for peer in self._peers.values()):
            return
        self._to_any = self.engine.irecv(self._any_header, MPI.ANY_SOURCE, HEADER_TAG, passive=True)
        self._to_any.then(self._on_any_header)

    def _on_any_header(self, op: Op) -> None:
        if op.cancelled:
            return
        if op.error is not None:
            self.error = self.error or op.error
            return
        header = bytearray(self._any_header)
        self._listen_to_any()
        peer = self._peers.get(op.source)
        if peer is None:
            self.error = self.error or WireError(f"rank {op.source} sends a message, and is no peer")
        elif peer.receives:
            peer.headers.append(header)
        elif not peer.lost:
            self._on_message(peer, header)

    def _on_header(self, peer: Peer, op: Op) -> None:
        if op.cancelled:
            return
        if op.error is not None:
            self._fail(peer, op.error)
            return
        self._on_message(peer, peer.header)

    def _on_message(self, peer: Peer, header: bytearray) -> None:
        """Receive what the header announces."""
        peer.receives = True
        if self.late.seconds:
            self.late.put(peer, header)
        else:
            self._receive_announced(peer, header)

    def _receive_announced(self, peer: Peer, header: bytearray) -> None:
        if peer.lost:
            return
        try:
            incoming = decode(header, peer.num_received, peer.rank)
            peer.num_received += 1
            if incoming.text_bytes:
                self._receive_text(peer, incoming)
            elif incoming.payload_bytes:
                self._receive_payload(peer, incoming)
            else:
                self._arrived(peer, incoming.message())
        except WireError as error:
            self.error = self.error or error

    def _receive_text(self, peer: Peer, incoming: Incoming) -> None:
        """The text, and then the payload, where there is one too."""
        text = bytearray(incoming.text_bytes)

        def unpack() -> Message | None:
            if incoming.kind == Kind.BUNDLE:
                self._receive_entries(peer, incoming, *unpack_entries(text, peer.rank))
                return None
            if not incoming.payload_bytes:
                return incoming.message(text.decode())
            self._receive_payload(peer, incoming, text.decode())
            return None

        self._receive_pieces(peer, [text], incoming.text_bytes, unpack)

    def _receive_entries(
        self, peer: Peer, bundle: Incoming, entries: list[IncomingEntry], holders: list[list[IncomingEntry]]
    ) -> None:
        """The payloads of a bundle, which several of its entries may hold."""
        payloads: dict[int, Any] = {}

        def complete() -> Message:
            return bundle.message(entries=tuple([entry.complete(payloads) for entry in entries]))

        def unpack(number: int, wire_buffer: Any) -> Message | None:
            for _ in holders[number][1:]:
                wire_buffer.hold()
            payloads[number] = wire_buffer
            return complete() if len(payloads) == len(holders) else None

        for number, (first, *_) in enumerate(holders):
            self._receive_into(peer, first.source, first.incoming, functools.partial(unpack, number))
        if not holders:
            self._arrived(peer, complete())

    def _receive_payload(self, peer: Peer, incoming: Incoming, text: str = "") -> None:
        """The payload, which stays with its sender where it is a push's for which there is no room."""
        if incoming.kind == Kind.PUSH:
            num_bytes, pushes = incoming.payload_bytes, self._pushes
            if not pushes.lets_in(peer.rank, num_bytes):
                pushes.put(peer.rank, num_bytes, (peer, incoming, text))
                if pushes.upto is not None and peer.rank > pushes.upto:
                    self.inbox.append((peer.rank, Announced()))
                return
        self._fetch_payload(peer, incoming, text)

    def _let_in(self) -> None:
        """Receive the pushes for which there is room now."""
        while (announced := self._pushes.take()) is not None:
            peer, incoming, text = announced
            if peer.lost:
                self._pushes.lost(peer.rank)
            else:
                self._fetch_payload(peer, incoming, text)

    def _fetch_payload(self, peer: Peer, incoming: Incoming, text: str) -> None:
        self._receive_into(peer, peer.rank, incoming, lambda wire_buffer: incoming.message(text, wire_buffer))

    def _receive_into(
        self, peer: Peer, source: int, incoming: Incoming, message_of: Callable[[Any], Message | None]
    ) -> None:
        """Receive the payload of a message that rank `source` has sent, by way of `peer`."""
        num_bytes, stamp = incoming.payload_bytes, incoming.stamp
        wire_buffer = self.buffer_for(source, incoming.kind)
        if not wire_buffer.fit(num_bytes):
            raise WireError(
                f"rank {peer.rank} announces {num_bytes} bytes for a shard of {wire_buffer.num_bytes}: "
                "other model or sharding?"
            )

        def unpack() -> Message | None:
            if wire_buffer.stamps() != (stamp, stamp):
                raise WireError(
                    f"payload of rank {peer.rank} is torn: stamps {wire_buffer.stamps()}, expected "
                    f"{stamp} at both ends"
                )
            return message_of(wire_buffer)

        self._receive_pieces(peer, messages_of_wire(wire_buffer, self.piece_bytes), num_bytes, unpack)

    def _receive_pieces(
        self, peer: Peer, pieces: Sequence[Any], num_bytes: int, unpack: Callable[[], Message | None]
    ) -> None:
        """Receive what comes in so many messages of MPI, and `unpack` it when it is whole."""
        num_left, received_bytes = len(pieces), 0

        def on_done(op: Op) -> None:
            nonlocal num_left, received_bytes
            num_left -= 1
            received_bytes += op.status_bytes
            if op.error is not None or num_left == 0:
                self._checked(peer, op.error, received_bytes, num_bytes, unpack)

        for piece in pieces:
            self.engine.irecv(piece, peer.rank, PAYLOAD_TAG).then(on_done)

    def _checked(
        self,
        peer: Peer,
        error: BaseException | None,
        received_bytes: int,
        num_bytes: int,
        unpack: Callable[[], Message | None],
    ) -> None:
        if error is None and received_bytes != num_bytes:
            error = WireError(f"rank {peer.rank} announced {num_bytes} bytes and sent {received_bytes}")
        if error is None:
            try:
                if (message := unpack()) is not None:
                    self._arrived(peer, message)
                return
            except WireError as failure:
                error = failure
        assert error is not None
        self._fail(peer, error)

    def _fail(self, peer: Peer, error: BaseException) -> None:
        """The role gets one message about a dead peer that may die; every other error ends the role."""
        if peer.lost:
            return
        if peer.rank in self._ends.may_die and is_dead_peer(error):
            peer.lost = True
            self.inbox.append((peer.rank, Lost()))
            self._pushes.lost(peer.rank)
        else:
            self.error = self.error or error

    def forget(self, rank: int, listen: bool) -> None:
        """A peer is given up; `listen`: but may speak again."""
        peer = self._peers[rank]
        if listen:
            peer.given_up = True
            self.engine.make_passive(peer.rank)
        if listen or peer.lost:
            return
        peer.lost = True
        if peer.listening is not None and not peer.listening.done:
            with contextlib.suppress(MPI.Exception):  # it has died meanwhile, and MPI has dropped the receive
                self.engine.cancel(peer.listening)

    def _arrived(self, peer: Peer, message: Message) -> None:
        peer.receives = False
        if not peer.lost:
            if type(message) is Push:
                self._pushes.arrived(peer.rank)
            if self._is_over and self._hears_late(peer):
                assert self._answer_late is not None
                self._answer_late(peer.rank, message)
            else:
                self.inbox.append((peer.rank, message))
            if self._to_any is None:
                self._listen(peer)
            elif peer.headers:
                self._on_message(peer, peer.headers.popleft())
        else:
            release(message)
            self._pushes.lost(peer.rank)

    def has_left(self) -> bool:
        """Whether everything that was sent to peers that are awaited has left."""
        awaited = [peer for peer in self._peers.values() if not peer.given_up]
        return not self.late and not any(one.num_unsent for one in awaited if not one.lost)

    def end(self) -> None:
        """The role is over: withdraw the receives, but from those that may speak late. One that a message has come for
        meanwhile is not posted again: it would take the messages of the next messenger of this process."""
        self._is_over = True
        self._pushes.room_bytes = math.inf
        self.open_to(None)
        self._withdraw([peer for peer in self._peers.values() if not self._hears_late(peer)])
        while (
            self.inbox and self._answer_late is not None
        ):  # has come of one that was given up, as the role ended
            source, message = self.inbox.popleft()
            if self._hears_late(self._peers[source]):
                self._answer_late(source, message)

    def close(self) -> None:
        """Nobody is answered any more."""
        self._answer_late = None
        self._withdraw(list(self._peers.values()))

    def _hears_late(self, peer: Peer) -> bool:
        """Whether this rank, whose role is over, is still there for `peer`."""
        return self._answer_late is not None and peer.given_up and not peer.lost

    def _withdraw(self, peers: list[Peer]) -> None:
        listening = [peer.listening for peer in peers if peer.listening is not None and not peer.lost]
        if self._to_any is not None and not any(self._hears_late(peer) for peer in self._peers.values()):
            listening.append(self._to_any)
        for op in listening:
            if not op.done:
                self.engine.cancel(op)
        with contextlib.suppress(TimeoutError):  # what MPI does not give back is named when the engine stops
            self.engine.wait_any(lambda: all(op.done for op in listening), self._ends.leave_s)
