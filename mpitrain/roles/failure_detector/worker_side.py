"""Whether the servers are still there: what a worker asks while it waits for an answer.

Invariants: for launches in which MPI reports no death. A worker that waits has nothing else to do, so it asks
`QUESTIONS` times per timeout, and every server says at once that it is there, whomever its strategy holds back. That
distinguishes a server that holds from one that is dead; and it informs a server that has answered that this worker
waits for another one. Unanswered questions are counted, not seconds: a rank that was stopped for a while asks again
before it judges.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

from mpitrain.effects import Effect, Now, Recv, Role, Send
from mpitrain.errors import EvictedError, LostRankError
from mpitrain.messages import Alive, Lost, Message

QUESTIONS = 4


class ServerProbe:
    """One worker's ear.

    A worker that was silent itself for longer than the timeout may have been given up, and the run be over: it leaves
    alone where one that was not would end the job.

    Args:
        rank: its own; servers: all.
        timeout_s: a server that has not answered for so long is dead; 0 asks nobody and waits for ever.
        signs_s: how often to say that it waits where nobody is judged by the answer: to a server that has let it go
            while another one holds it, it would seem to be silent. 0: never.
    """

    def __init__(self, rank: int, servers: tuple[int, ...], timeout_s: float = 0.0, signs_s: float = 0.0):
        self.rank, self.servers, self.timeout_s = rank, servers, timeout_s
        self.every_s = timeout_s / QUESTIONS or signs_s
        self._last_s = 0.0
        # servers that may have given it up: it was silent for so long itself, and they have answered no question since
        self._late: set[int] = set()

    def receive(
        self, awaited: Collection[int], served: bool = True
    ) -> Generator[Effect, Any, tuple[int, Message]]:
        """The next message. `awaited`: servers that owe this worker an answer; `served`: the others are there too.

        Raises:
            LostRankError: a server is dead.
            EvictedError: the servers have gone on without this worker, and left.
        """
        if not self.every_s:
            message: tuple[int, Message] = yield Recv(kind="an answer", sources=awaited)
            return message
        unanswered = dict.fromkeys(awaited, 0)
        self._hurry((yield Now()))
        while True:
            arrived: tuple[int, Message] | None = yield Recv(self.every_s, "an answer", awaited)
            self._hurry((yield Now()))
            if arrived is None:
                self._judge(unanswered)
                for server in self.servers if served else awaited:
                    unanswered[server] = unanswered.get(server, 0) + 1
                    yield Send(server, Alive())
            elif isinstance(arrived[1], Alive):
                unanswered[arrived[0]] = 0
                self._late.discard(arrived[0])  # what else comes may have been under way for long
            else:
                return arrived

    def _hurry(self, now_s: float) -> None:
        """Between two words of its own this worker must not be silent for long, or it may have been given up."""
        if now_s - self._last_s > self.timeout_s:
            self._late.update(self.servers)
        self._last_s = now_s

    def _judge(self, unanswered: dict[int, int]) -> None:
        if not self.timeout_s:
            return
        dead = [server for server, number in unanswered.items() if number >= QUESTIONS]
        if self._late & set(dead):
            raise EvictedError(
                f"rank {self.rank} (worker) was silent for too long, and nobody answers it: the run has gone on "
                "without it"
            )
        if dead:
            ranks = ", ".join(map(str, dead))
            raise LostRankError(
                f"rank {self.rank} (worker) has had no answer of rank {ranks} (server) for {self.timeout_s:g} s "
                "(--heartbeat-s): the job ends, to be started again from its newest checkpoint"
            )


def report_failure(servers: tuple[int, ...]) -> Role:
    """The role of a worker that has failed and can still say so: nobody has to find out by its silence."""
    for server in servers:
        yield Send(server, Lost())
