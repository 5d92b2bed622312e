"""What makes bundles of the messages that a worker or a server sends, and takes apart those that come for it.

Invariants: it answers the effects of a role, which it does not change. What a role sends leaves before the role waits
or computes something that takes long, so nothing is late; what a server answers to all messages of one bundle leaves
together. A server reports to an aggregator, with the answers, that it has dealt with what was in a bundle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Mapping
from typing import Any

from mpitrain.effects import Compute, Effect, Forget, Now, Recv, Role, Send
from mpitrain.messages import Bundle, Entry, Message


def bundled(role: Role, rank: int, routes: Mapping[int, int], serves: bool) -> Role:
    """The role of `rank`, which speaks to the ranks of `routes` through the aggregators that are named there.

    Args:
        serves: it is a server's; otherwise it is a worker's, and its end is reported.
    """
    return _Bundler(rank, routes, serves).follow(role) if routes else role


class _Bundler:
    def __init__(self, rank: int, routes: Mapping[int, int], serves: bool):
        self.rank, self.routes, self.serves = rank, routes, serves
        self._inside: deque[tuple[int, Message]] = deque()  # messages that have come, and not been taken up
        self._leaving: dict[int, list[Entry]] = {}  # by aggregator
        self._taken: Counter[int] = Counter()  # bundles that the role deals with

    def follow(self, role: Role) -> Role:
        answer: Any = None
        while True:
            try:
                effect = role.send(answer)
            except StopIteration as end:
                yield from self._flush()
                for aggregator in () if self.serves else sorted(set(self.routes.values())):
                    yield Send(aggregator, Bundle(()))
                return end.value
            answer = yield from self._answer(effect)

    def _answer(self, effect: Effect) -> Generator[Effect, Any, Any]:
        if isinstance(effect, Send) and effect.to in self.routes:
            entry = Entry(self.rank, effect.to, effect.message)
            self._leaving.setdefault(self.routes[effect.to], []).append(entry)
            return None
        if isinstance(effect, Forget) and effect.rank in self.routes:
            return None  # its aggregator is there, and drops what it does not take any more
        if isinstance(effect, Recv):
            return (yield from self._receive(effect))
        is_short = isinstance(effect, Send | Now) or (isinstance(effect, Compute) and effect.what == "apply")
        if not is_short:
            yield from self._flush()
        return (yield effect)

    def _receive(self, effect: Recv) -> Generator[Effect, Any, Any]:
        if not self._inside:
            yield from self._flush()
            arrived = yield effect
            if arrived is None or not isinstance(arrived[1], Bundle):
                return arrived
            source, bundle = arrived
            if self.serves:
                self._taken[source] += 1
            self._inside.extend((entry.source, entry.message) for entry in bundle.entries)
        return self._inside.popleft()

    def _flush(self) -> Generator[Effect, Any, None]:
        leaving, taken = self._leaving, self._taken
        self._leaving, self._taken = {}, Counter()
        for aggregator in dict.fromkeys((*taken, *leaving)):
            entries = tuple(leaving.get(aggregator, ()))
            yield Send(aggregator, Bundle(entries, taken[aggregator]))
