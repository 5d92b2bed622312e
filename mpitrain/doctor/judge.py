"""Which links and which nodes are slow, and which ranks share a device: pure functions of what was measured.

Invariants: a node is judged by its *best* link, because one bad cable makes every link to it slow and nobody else's
fault; a link is blamed only if both its ends have better ones. With two nodes there is one link, and neither node can
be blamed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

SLOW = 0.5  # of what the others reach
HIGH_LATENCY = 20.0  # times the others': below that, a busy machine cannot be distinguished from a bad link


class Link(NamedTuple):
    """One pair of nodes. `latency_s`: one way, the least of many; `rate`: bytes per second, the best of several."""

    latency_s: float
    rate: float


class Verdict(NamedTuple):
    """Names of nodes, and pairs of names, worst first."""

    nodes: list[str]
    links: list[tuple[str, str]]


def judge(links: Mapping[tuple[str, str], Link], slow: float = SLOW) -> Verdict:
    """Find what is slow among the links of three or more nodes; nothing is found among fewer.

    Args:
        links: a `Link` for every pair of nodes, each pair once.
        slow: below this fraction of the usual rate a link is slow.
    """
    names = sorted({name for pair in links for name in pair})
    if len(names) < 3:
        return Verdict([], [])
    best = {name: max(link.rate for pair, link in links.items() if name in pair) for name in names}
    quick = {name: min(link.latency_s for pair, link in links.items() if name in pair) for name in names}
    usual_rate = statistics.median_high(best.values())
    usual_latency_s = statistics.median_low(quick.values())

    def bad(rate: float, latency_s: float) -> bool:
        return rate < slow * usual_rate or latency_s > HIGH_LATENCY * usual_latency_s

    nodes = [name for name in names if bad(best[name], quick[name])]
    pairs = [
        pair for pair, link in links.items() if not set(pair) & set(nodes) and bad(link.rate, link.latency_s)
    ]
    return Verdict(sorted(nodes, key=best.__getitem__), sorted(pairs, key=lambda pair: links[pair].rate))


def sharing(devices: list[str | None]) -> list[tuple[str, list[int]]]:
    """Devices that more than one rank holds: (device, ranks).

    Args:
        devices: each rank's device by a name that is unique in the cluster; `None`: it has none.
    """
    holders: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        if device is not None:
            holders.setdefault(device, []).append(rank)
    return [(device, ranks) for device, ranks in holders.items() if len(ranks) > 1]


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which a node has at most one partner (the circle method), so that pairs of one
    round do not share a link.
    """
    ring: list[int | None] = list(range(num_nodes)) + ([None] if num_nodes % 2 else [])
    found = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found
