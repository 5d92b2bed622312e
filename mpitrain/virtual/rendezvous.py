"""Messages that wait for their receiver: MPI sends what is longer than its eager limit by a rendezvous.

    header             to the receiver, which looks at it when it calls MPI, and then posts its receive
    clear to send      back to the sender, which looks at it when it calls MPI
    data               to the receiver

Two messages more than an eager one, and both ranks have to call MPI: one that computes on the thread that owns MPI lets
others wait. (Rashti and Afsahi, "Improving communication progress and overlap in MPI rendezvous protocol over
RDMA-enabled interconnects", 2008.) Data that have set out travel by themselves, as they do out of a socket's buffers.

Invariants: messages between two ranks keep their order, for `mpi/messenger.py` looks at a header when the message
before it is there as a whole. A clear to send queues at links like any other bytes: where a law serves messages first
come, first served, it waits behind the data that its sender has begun to send. Nothing here knows a clock; the world
hands in what takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitrain.messages import Lost
from mpitrain.virtual.message_law import CONTROL_BYTES


@dataclass(frozen=True)
class Header:
    """Has come to the receiver.

    Args:
        source, to: ranks; num_bytes: of the data; message: what they are; sent: the message that a trace shows.
    """

    source: int
    to: int
    num_bytes: int
    message: Any
    sent: Any


@dataclass(frozen=True)
class Clear:
    """The sender hears that it may send."""

    header: Header

    @property
    def message(self) -> Any:
        """What is to be sent."""
        return self.header.message


Event = Header | Clear


class Rendezvous:
    """The handshakes of all ranks of a world.

    Args:
        begin: (source, to, bytes, event, message that a trace shows): the event happens to `to` when the bytes are
            there.
        discard: takes a message that nobody will receive.
        eager_bytes: messages of more bytes wait for their receiver.
        header_bytes: of a header.
    """

    def __init__(
        self,
        begin: Callable[[int, int, int, Any, Any], None],
        discard: Callable[[Any], None],
        eager_bytes: int,
        header_bytes: int,
    ):
        self._begin, self._discard = begin, discard
        self._eager_bytes, self._header_bytes = eager_bytes, header_bytes
        # headers, and messages that came behind them, by (source, to); the first header is being answered
        self._queues: dict[tuple[int, int], deque[Any]] = {}
        self._under_way: set[tuple[int, int]] = set()  # whose data have set out
        self._idle: dict[int, list[Event]] = {}  # what a rank will look at when it calls MPI next

    def send(self, source: int, to: int, num_bytes: int, message: object, sent: object) -> None:
        """A message sets out, or its header does."""
        if num_bytes <= self._eager_bytes:
            self._begin(source, to, num_bytes, (source, message), sent)
        else:
            header = Header(source, to, num_bytes, message, sent)
            self._begin(source, to, self._header_bytes, header, None)

    def happens(self, event: Event, drives: bool) -> None:
        """To its rank, which looks at it now if it `drives` MPI."""
        if isinstance(event, Clear):
            self._look(event.header.source, event, drives)
            return
        queue = self._queues.setdefault((event.source, event.to), deque())
        queue.append(event)
        if len(queue) == 1:
            self._look(event.to, event, drives)

    def drive(self, rank: int) -> None:
        """The rank calls MPI."""
        if rank in self._idle:
            for event in self._idle.pop(rank):
                self._look(rank, event, True)

    def arrived(self, rank: int, letter: tuple[int, object], drives: bool) -> list[tuple[int, Any]]:
        """A message (source, message) is there as a whole; returns those that may be taken now, in order."""
        pair = letter[0], rank
        queue = self._queues.get(pair)
        if not queue:
            return [letter]
        if isinstance(queue[0], Header) and queue[0].message is letter[1]:
            queue.popleft()
            self._under_way.discard(pair)
        elif isinstance(letter[1], Lost):  # data that have set out would be here
            del self._queues[pair]
            for _, message in (one for one in queue if isinstance(one, tuple)):
                self._discard(message)
            return [letter]
        else:
            queue.append(letter)
            return []
        taken = [letter]
        while queue and isinstance(queue[0], tuple):
            taken.append(queue.popleft())
        if queue:
            self._look(rank, queue[0], drives)
        return taken

    def forget(self, rank: int) -> None:
        """A rank is no more: what waits for it nobody will take."""
        for event in self._idle.pop(rank, ()):
            if isinstance(event, Clear):
                self._discard(event.message)
        for pair in [pair for pair in self._queues if pair[1] == rank]:
            left = list(self._queues.pop(pair))
            for one in left[pair in self._under_way :]:  # what has set out is thrown away where it arrives
                self._discard(one.message if isinstance(one, Header) else one[1])

    def _look(self, rank: int, event: Event, drives: bool) -> None:
        if not drives:
            self._idle.setdefault(rank, []).append(event)
        elif isinstance(event, Clear):
            header = event.header
            self._under_way.add((header.source, header.to))
            self._begin(rank, header.to, header.num_bytes, (rank, header.message), header.sent)
        else:
            self._begin(rank, event.source, CONTROL_BYTES, Clear(event), None)
