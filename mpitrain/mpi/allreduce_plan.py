"""What decides which algorithm carries an allreduce, besides its size and where the ranks lie: a user's word, or a
measurement.

Invariants: algorithms add in different orders, and a measurement depends on timing. So both are kept in
checkpoints, and a run that goes on among ranks that lie alike decides by them: its bits depend on no timing. A word of
this launch (`MPITRAIN_ALLREDUCE`) wins. No torch, no messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import UsageError

VARIABLE = "MPITRAIN_ALLREDUCE"
AUTO, LIBRARY, DIRECT, HIERARCHICAL = "auto", "library", "direct", "hierarchical"
ALGORITHMS = (AUTO, LIBRARY, DIRECT, HIERARCHICAL)
FAST_BYTES_PER_S = 2.5e9  # from here on the library is trusted: 20 Gbit/s


@dataclass(frozen=True)
class Transport:
    """What the slowest link between nodes does: one-way latency of a small message, and bytes per second."""

    latency_s: float
    bytes_per_s: float

    @property
    def is_fast(self) -> bool:
        """True where the library's algorithms are trusted."""
        return self.bytes_per_s >= FAST_BYTES_PER_S


def pinned() -> str | None:
    """The user's word: "auto", the name of an algorithm, or None; UsageError for anything else."""
    told = os.environ.get(VARIABLE, "").lower() or None
    if told not in (None, *ALGORITHMS):
        raise UsageError(f"{VARIABLE}={told}: say one of {', '.join(ALGORITHMS)}")
    return told


class Plan:
    """What decides a process's allreduces: the user's word, and how fast the links between ranks were when they were
    measured. All groups whose ranks lie alike share one measurement.

    Args:
        nodes: the node of every rank of the world.
    """

    def __init__(self, nodes: Sequence[int]):
        self._nodes = nodes
        self._before: str | None = None  # the word under which the run began from which this one goes on
        self._measured: list[list[Any]] = []  # [ranks by node, latency_s, bytes_per_s]

    def setting(self) -> str:
        """The word that holds now: this launch's, or that of the run from which this one goes on."""
        return pinned() or self._before or AUTO

    def known(self, nodes: Sequence[Sequence[int]]) -> Transport | None:
        """What was measured between ranks of the world that lie so."""
        for layout, latency_s, bytes_per_s in self._measured:
            if layout == [list(node) for node in nodes]:
                return Transport(latency_s, bytes_per_s)
        return None

    def learn(self, nodes: Sequence[Sequence[int]], transport: Transport) -> None:
        """It has been measured."""
        self._measured.append([[list(node) for node in nodes], transport.latency_s, transport.bytes_per_s])

    def merge(self, measured: Sequence[list[Any]]) -> None:
        """Take over what groups have measured of which this rank is no member."""
        self._measured += [
            list(row) for row in measured if all(row[0] != known[0] for known in self._measured)
        ]

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint; what is measured later is in it, too."""
        return {"setting": self.setting(), "nodes": list(self._nodes), "measured": self._measured}

    def adopt(self, saved: dict[str, Any] | None) -> bool:
        """Decide as the run did whose `state` was `saved`; False where ranks lie otherwise now, or nothing is known."""
        fits = saved is not None and list(saved["nodes"]) == list(self._nodes)
        self._before = saved["setting"] if saved is not None and fits else None
        if saved is not None and fits:
            self._measured = [list(row) for row in saved["measured"]]
        return fits

    def renumber(self, nodes: Sequence[int]) -> None:
        """Ranks have died, and the others have other numbers now: what was measured is of other links."""
        self._nodes, self._measured = nodes, []
