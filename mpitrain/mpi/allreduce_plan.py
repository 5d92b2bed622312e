"""What decides which algorithm carries an allreduce, besides its size and the nodes of its ranks: a user's setting, or
a measurement.

Invariants: algorithms add in different orders, and a measurement depends on timing. So both are kept in
checkpoints, and a resumed run whose ranks are on nodes in the same way decides by them: its bits depend on no timing.
A setting of this launch (`MPITRAIN_ALLREDUCE`) wins. This file knows neither torch nor messages.
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
    """The user's setting: "auto", the name of an algorithm, or None; UsageError for anything else."""
    setting = os.environ.get(VARIABLE, "").lower() or None
    if setting not in (None, *ALGORITHMS):
        raise UsageError(f"{VARIABLE}={setting} is not known; set it to one of {', '.join(ALGORITHMS)}")
    return setting


class Plan:
    """What decides a process's allreduces: the user's setting, and how fast the links between ranks were when they were
    measured. All groups whose ranks are on the same nodes share one measurement.

    Args:
        nodes: the node of every rank of the world.
    """

    def __init__(self, nodes: Sequence[int]):
        self._nodes = nodes
        self._before: str | None = None  # the setting of the run that this one resumes
        self._measured: list[list[Any]] = []  # [ranks by node, latency_s, bytes_per_s]

    def setting(self) -> str:
        """The setting in force: this launch's, or that of the run that this one resumes."""
        return pinned() or self._before or AUTO

    def known(self, nodes: Sequence[Sequence[int]]) -> Transport | None:
        """What was measured between these ranks of the world, grouped by node."""
        for layout, latency_s, bytes_per_s in self._measured:
            if layout == [list(node) for node in nodes]:
                return Transport(latency_s, bytes_per_s)
        return None

    def learn(self, nodes: Sequence[Sequence[int]], transport: Transport) -> None:
        """Note a measurement."""
        self._measured.append([[list(node) for node in nodes], transport.latency_s, transport.bytes_per_s])

    def merge(self, measured: Sequence[list[Any]]) -> None:
        """Take over the measurements of groups that this rank does not belong to."""
        self._measured += [
            list(row) for row in measured if all(row[0] != known[0] for known in self._measured)
        ]

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint; later measurements are added to the same object."""
        return {"setting": self.setting(), "nodes": list(self._nodes), "measured": self._measured}

    def adopt(self, saved: dict[str, Any] | None) -> bool:
        """Decide as the run did whose `state` was `saved`; False where the ranks are on other nodes now, or nothing is
        known."""
        fits = saved is not None and list(saved["nodes"]) == list(self._nodes)
        self._before = saved["setting"] if saved is not None and fits else None
        if saved is not None and fits:
            self._measured = [list(row) for row in saved["measured"]]
        return fits

    def renumber(self, nodes: Sequence[int]) -> None:
        """Ranks have died and the others were renumbered: forget what was measured, which holds for other links."""
        self._nodes, self._measured = nodes, []
