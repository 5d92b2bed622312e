"""A worker's questions for rows of tables, beside the rows that come with every answer.

Invariants: what a pass over a batch needs is asked for until nothing is missing; a pass that comes upon more says so,
and is made again. What else arrives meanwhile is put off, in its order, for whoever waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

from mpitrain.effects import Effect, Send
from mpitrain.messages import Message, Payload, PullRows, Rows
from mpitrain.roles.protocols import TabledReplica

Steps = Generator[Effect, Any, Any]
Receive = Callable[[Collection[int], bool], Generator[Effect, Any, tuple[int, Message]]]
Missing = Callable[[], dict[int, Payload]]
Hold = Callable[[int, Payload], None]


class RowPulls:
    """Of one worker.

    Args:
        servers: the ranks of all; receive: the next message, of servers that owe one; step: of the worker's next push.
        replica: the worker's.
    """

    def __init__(
        self, servers: tuple[int, ...], receive: Receive, step: Callable[[], int], replica: TabledReplica
    ):
        self.servers, self._receive, self._step, self.replica = servers, receive, step, replica
        self._early: deque[tuple[int, Message]] = deque()

    def receive(self, awaited: Collection[int], served: bool = True) -> Steps:
        """The next message that is no answer to a question for rows."""
        if self._early:
            return self._early.popleft()
        return (yield from self._receive(awaited, served))

    def of_batch(self, lease: object, step: int) -> Steps:
        """Fetch the rows of a batch."""
        yield from self.fetch(lambda: self.replica.missing(lease, step), self.replica.hold)

    def of_model(self) -> Steps:
        """Fetch the rows of the final model."""
        yield from self.fetch(self.replica.missing_of_model, self.replica.hold_model, trains=False)

    def fetch(self, missing: Missing, hold: Hold, trains: bool = True) -> Steps:
        """Ask for what `missing` says of each shard until it says nothing, and hand over what comes to `hold`.
        `trains`: as in `PullRows`."""
        while asked := missing():
            awaited = {self.servers[shard] for shard in asked}
            for shard, payload in asked.items():
                yield Send(self.servers[shard], PullRows(self._step(), payload, trains))
            while awaited:
                source, message = yield from self._receive(awaited, True)
                if isinstance(message, Rows):
                    awaited.discard(source)
                    hold(self.servers.index(source), message.payload)
                else:
                    self._early.append((source, message))
