"""The aggregator: stands between the workers of one node and all servers, and computes no gradient.

    workers  -> aggregator    each message as it is sent
    aggregator -> a server    what has come for it, in one bundle, as soon as it has dealt with the bundle before
    a server -> aggregator    all answers to a bundle, in one
    aggregator -> workers     each its own

So a server that is busy finds fewer and larger bundles, and one that is not delays nothing.

Where gradients are summed, a push waits until every worker that the server has answered has pushed, or has said that
it has nothing to push. Then they leave as one: the pushes of all, in the order of their ranks, and one payload, the sum

    g = sum over the workers of (share / first share) g_i

with the first push that counts at all; the others come without (`NOT_SENT`), and so do gradients that are not finite,
which enter no sum. The server counts each push, and adds g with the share of the push that carries it.

Invariants: the messages of one worker to one server keep their order, but that a push which waits is overtaken by what
its worker sends meanwhile: signs of life and parts of a validation, which change no count. What a sum is made of
depends on which pushes the server has answered, never on timing. Its memory holds what is under way and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from mpitrain.effects import Compute, Effect, Recv, Role, Send
from mpitrain.messages import (
    NOT_SENT,
    Answer,
    Bundle,
    CheckpointRequest,
    Done,
    Entry,
    Idle,
    Message,
    Push,
    release,
)
from mpitrain.roles.out_of_turn import out_of_turn
from mpitrain.roles.protocols import NodeSums

Steps = Generator[Effect, Any, None]


class Aggregator:
    """One node's aggregator.

    Args:
        rank: its own; servers: all of them; members: the workers of its node.
        sums: adds gradients up; None: all are passed on as they are.
        asked: whether this process has been asked to end; the next push says so for it.
    """

    def __init__(
        self,
        rank: int,
        servers: Iterable[int],
        members: Iterable[int],
        sums: NodeSums | None = None,
        asked: Callable[[], bool] = lambda: False,
    ):
        self.rank, self.servers, self.sums, self.asked = rank, tuple(servers), sums, asked
        self._present = set(members)
        self._queues = {server: _Queue(server, self._present) for server in self.servers}
        self.num_bundles = self.num_pushes = self.num_sums = 0

    def run(self) -> Role:
        """Pass messages on until every worker has ended, and the servers have what they sent; returns counts."""
        while self._present or any(queue.num_sent or queue.entries for queue in self._queues.values()):
            arrived = yield Recv(kind="a message", sources=self._present | set(self.servers))
            yield from self._take(*arrived)
            for server, queue in self._queues.items():
                yield from self._send_on(server, queue)
        return {
            "rank": self.rank,
            "bundles": self.num_bundles,
            "pushes": self.num_pushes,
            "sums": self.num_sums,
        }

    def _take(self, source: int, message: Message) -> Steps:
        if not isinstance(message, Bundle) or not (source in self._present or source in self._queues):
            raise out_of_turn(source, message, f"rank {self.rank} (aggregator)")
        if source in self._queues:
            yield from self._hand_down(source, message)
            return
        if not message.entries:
            self._present.discard(source)
        for entry in message.entries:
            if isinstance(entry.message, Push):
                self.num_pushes += 1
                entry = entry._replace(message=self._with_request(entry.to, entry.message))
            self._queues[entry.to].take_entry(entry, self.sums is not None)

    def _with_request(self, server: int, push: Push) -> Push:
        """The push, which asks the dealing server for a checkpoint and the end where this process has been asked."""
        ends = push.checkpoint is not None and push.checkpoint.final
        if server != self.servers[0] or ends or not self.asked():
            return push
        return dataclasses.replace(push, checkpoint=CheckpointRequest())

    def _hand_down(self, server: int, bundle: Bundle) -> Steps:
        queue = self._queues[server]
        queue.num_sent -= bundle.num_taken
        for member in dict.fromkeys(entry.to for entry in bundle.entries):
            entries = tuple(entry for entry in bundle.entries if entry.to == member)
            if member in self._present:
                for entry in entries:
                    queue.answered(entry)
                yield Send(member, Bundle(entries))
            else:  # it has ended, and the server did not know yet
                release(Bundle(entries))

    def _send_on(self, server: int, queue: _Queue) -> Steps:
        if queue.held and not queue.expected:
            yield from self._sum(queue)
        if queue.entries and not queue.num_sent:
            entries, queue.entries = tuple(queue.entries), []
            queue.num_sent, self.num_bundles = 1, self.num_bundles + 1
            yield Send(server, Bundle(entries))

    def _sum(self, queue: _Queue) -> Steps:
        """All pushes that wait, and their sum with the first that counts."""
        pushes, queue.held = dict(sorted(queue.held.items())), {}
        finite = [worker for worker, push in pushes.items() if push.finite]
        carrier = next((worker for worker in finite if pushes[worker].share), min(finite, default=-1))
        others = []
        for worker, push in pushes.items():
            if worker == carrier:
                continue
            if push.finite and push.share:
                others.append((push.share / pushes[carrier].share, push.payload))
            else:
                push.payload.release()
            pushes[worker] = dataclasses.replace(push, payload=NOT_SENT)
        if others:
            assert self.sums is not None, "only where there are sums"
            sums, total = self.sums, pushes[carrier].payload
            yield Compute(lambda: sums.add(total, others), "sum", num_batches=len(others))
            self.num_sums += 1
        queue.entries += [Entry(worker, queue.server, push) for worker, push in pushes.items()]


class _Queue:
    """What an aggregator has for one server, and knows of it."""

    def __init__(self, server: int, members: Iterable[int]):
        self.server = server
        self.entries: list[Entry] = []  # to be sent
        self.num_sent = 0  # bundles that it has not dealt with
        self.held: dict[int, Push] = {}  # pushes that wait for those of the others, by worker
        self.expected = set(members)  # who may push before it is answered

    def take_entry(self, entry: Entry, sums: bool) -> None:
        """A message of a worker."""
        if isinstance(entry.message, Push | Idle | Done):
            self.expected.discard(entry.source)
        if sums and isinstance(entry.message, Push):
            self.held[entry.source] = entry.message
        else:
            self.entries.append(entry)

    def answered(self, entry: Entry) -> None:
        """A message to a worker."""
        if isinstance(entry.message, Answer):
            (self.expected.discard if entry.message.stop else self.expected.add)(entry.to)


def summary(aggregators: Iterable[int], returned: Mapping[int, object]) -> dict[str, Any]:
    """What a result holds of the aggregators, by what each rank has returned; empty where there is none."""
    rows = [returned[rank] for rank in aggregators]
    return {"aggregators": len(rows), "per_aggregator": rows} if rows else {}
