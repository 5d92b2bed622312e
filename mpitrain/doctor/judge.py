"""Which links and which nodes are slow, which ranks share a device, and what is no node's fault: pure functions of what
was measured.

Invariants: a node is judged by its *best* link, because one bad cable makes every link to it slow and nobody else's
fault; a link is blamed only if both its ends have better ones. With two nodes there is one link, and neither node can
be blamed. A node's own speed is compared with the median of the other nodes of its kind, of which there have to be two.
What most nodes fail in the same way is the site's, or the site file's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SLOW = 0.5  # of what the others reach
ALL_PAIRS = 64  # with more nodes (or ranks of a node) partners are sampled
SAMPLED_ROUNDS = 10
HIGH_LATENCY = 20.0  # times the others': below that, a busy machine cannot be distinguished from a bad link


class Figure(NamedTuple):
    """Something that is measured on every node, larger is better. `slow`: below this fraction of the others' a node is
    slow; `None`: of what is asked for. Settings differ less than measurements do; disks, which fill and age,
    differ more."""

    label: str
    unit: str
    slow: float | None = None


FIGURES = {
    "matmul_gflop_per_s": Figure("matrix product", "GFLOP/s"),
    "memory_gb_per_s": Figure("memory copy", "GB/s"),
    "disk_write_mb_per_s": Figure("disk write", "MB/s", 0.25),
    "disk_read_mb_per_s": Figure("disk read", "MB/s", 0.25),
    "gpu_matmul_gflop_per_s": Figure("GPU matrix product", "GFLOP/s"),
    "gpu_max_clock_mhz": Figure("highest GPU clock", "MHz", 0.95),
    "gpu_power_limit_w": Figure("GPU power limit", "W", 0.95),
}


def told(name: str, value: float) -> str:
    """A value of `FIGURES` with its unit, in three digits."""
    digits = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{digits} {FIGURES[name].unit}"


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
    best, quick = dict.fromkeys(names, 0.0), dict.fromkeys(names, float("inf"))
    for pair, link in links.items():
        for name in pair:
            best[name], quick[name] = max(best[name], link.rate), min(quick[name], link.latency_s)
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


def slow_nodes(
    nodes: Mapping[str, tuple[str, Mapping[str, float]]], slow: float = SLOW
) -> dict[str, list[str]]:
    """What is slow about each node that is slow, in words; nothing is found among fewer than three of a kind.

    Args:
        nodes: kind and figures (`FIGURES`) of each node by name; only nodes of one kind are compared.
        slow: below this fraction of the others' median a node is slow.
    """
    found: dict[str, list[str]] = {}
    for name, (kind, figures) in nodes.items():
        for figure in (figure for figure in FIGURES if figure in figures):
            others = [
                values[figure]
                for other, (its_kind, values) in nodes.items()
                if other != name and its_kind == kind and figure in values
            ]
            if len(others) < 2:
                continue
            usual = statistics.median(others)
            if figures[figure] < (FIGURES[figure].slow or slow) * usual:
                text = f"{FIGURES[figure].label} {told(figure, figures[figure])}, the others' median is"
                found.setdefault(name, []).append(f"{text} {told(figure, usual)}")
    return found


def common_faults(faults: Mapping[str, set[str]], num_nodes: int) -> dict[str, int]:
    """Checks that more than half of two or more nodes fail, and how many do: a problem of the site, the site file or
    the job, and not of these nodes.

    Args:
        faults: the checks that each unfit node has failed.
        num_nodes: how many nodes were looked at.
    """
    counts: dict[str, int] = {}
    for names in faults.values():
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return {name: count for name, count in counts.items() if count > 1 and count > num_nodes / 2}


def rounds(num_nodes: int, most: int | None = None) -> Iterator[list[tuple[int, int]]]:
    """Pairs in rounds in which a node has at most one partner (the circle method), so that pairs of one round do not
    share a link; every pair once.

    Args:
        most: with more nodes than `ALL_PAIRS`, only so many rounds: a sample, the same on every rank, in which each
            node meets other partners in each round.
    """
    num_places = num_nodes + num_nodes % 2
    numbers = list(range(max(0, num_places - 1)))
    place = list(range(num_nodes))
    if most is not None and num_nodes > ALL_PAIRS:
        chance = random.Random(num_nodes)
        numbers = sorted(chance.sample(numbers, min(most, len(numbers))))
        chance.shuffle(place)
    last = num_places - 1
    for number in numbers:
        pairs = [(number, last)] + [
            ((number + i) % last, (number - i) % last) for i in range(1, num_places // 2)
        ]
        found = [(place[a], place[b]) for a, b in pairs if a < num_nodes and b < num_nodes]
        yield [(min(pair), max(pair)) for pair in found]


def disjoint(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same pairs in rounds in which a node has at most one partner."""
    left = list(pairs)
    while left:
        taken: list[tuple[int, int]] = []
        busy: set[int] = set()
        for pair in left:
            if not busy.intersection(pair):
                taken.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in taken]
        yield taken
