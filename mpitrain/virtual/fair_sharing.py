"""Messages that share links: each pair of ranks gets its max-min fair share of every link of its path.

Invariants: a pair of ranks has one message under way at a time, and those behind it wait, as on one connection, so
messages keep their order. Shares are found by progressive filling (Bertsekas and Gallager, "Data Networks", 1992,
section 6.5.2): the link that has least for each of its messages is shared out first. They change when a message begins
or ends, which costs time in proportion to all messages under way.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from mpitrain.virtual.network import Hop, LinkName, Links, NetworkLaw

_BYTE = 1e-6  # less than so much of a byte is rounding


@dataclass
class _Flow:
    """A message under way."""

    path: list[Hop]
    left: float  # bytes
    what: Any
    rate: float = 0.0
    end_s: float = math.inf


class Flows:
    """All messages under way.

    Args:
        law: names the links of a path; links: where ranks stand.
    """

    def __init__(self, law: NetworkLaw, links: Links):
        self.law, self.links = law, links
        self.next_s = math.inf  # when the next message has left the last link
        self._now_s = 0.0
        self._under_way: dict[tuple[int, int], _Flow] = {}
        self._behind: dict[tuple[int, int], deque[tuple[int, Any]]] = {}

    def start(self, now_s: float, source: int, to: int, num_bytes: int, what: object) -> None:
        """A message sets out, or waits for the one before it."""
        pair = source, to
        if pair in self._under_way:
            self._behind.setdefault(pair, deque()).append((num_bytes, what))
            return
        self._advance(now_s)
        self._under_way[pair] = _Flow(self.law.path(self.links, source, to), num_bytes, what)
        self._share()

    def take(self, now_s: float) -> list[tuple[float, int, Any]]:
        """(time of arrival, rank, message) of those that have passed all links by now."""
        self._advance(now_s)
        ended = [pair for pair, flow in self._under_way.items() if flow.end_s <= now_s or flow.left <= _BYTE]
        arrivals = []
        for pair in ended:
            flow = self._under_way.pop(pair)
            arrivals.append((now_s + sum(hop.latency_s for hop in flow.path), pair[1], flow.what))
            if behind := self._behind.get(pair):
                num_bytes, what = behind.popleft()
                self._under_way[pair] = _Flow(flow.path, num_bytes, what)
        if ended:
            self._share()
        return arrivals

    def _advance(self, now_s: float) -> None:
        for flow in self._under_way.values():
            flow.left -= flow.rate * (now_s - self._now_s)
        self._now_s = now_s

    def _share(self) -> None:
        """Give each message its rate."""
        left: dict[LinkName, float] = {}
        users: dict[LinkName, dict[tuple[int, int], None]] = {}  # in order
        for pair, flow in self._under_way.items():
            for hop in flow.path:
                left[hop.link] = hop.rate
                users.setdefault(hop.link, {})[pair] = None
        while users:
            tightest = min(users, key=lambda link: left[link] / len(users[link]))
            rate = left[tightest] / len(users[tightest])
            for pair in list(users[tightest]):
                flow = self._under_way[pair]
                flow.rate, flow.end_s = rate, self._now_s + max(0.0, flow.left) / rate
                for hop in flow.path:
                    left[hop.link] -= rate
                    del users[hop.link][pair]
                    if not users[hop.link]:
                        del users[hop.link]
        self.next_s = min((flow.end_s for flow in self._under_way.values()), default=math.inf)
