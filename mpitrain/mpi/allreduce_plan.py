"""What decides which algorithm carries an allreduce, besides its size and the nodes of its ranks: a user's setting, or
a measurement.

Invariants: algorithms add in different orders, and a measurement depends on timing. So both are kept in
checkpoints, and a resumed run whose ranks are on nodes in the same way decides by them: its bits depend on no timing.
A setting of this launch (`MPITRAIN_ALLREDUCE`) wins. Which of its own algorithms the MPI library then takes is not
ours to decide: its version, and what the environment tells it of its collectives, are kept too, to say where a resumed
run has others. This file knows neither torch nor messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import UsageError

VARIABLE = "MPITRAIN_ALLREDUCE"
AUTO, LIBRARY, DIRECT, HIERARCHICAL = "auto", "library", "direct", "hierarchical"
ALGORITHMS = (AUTO, LIBRARY, DIRECT, HIERARCHICAL)
# Variables by which MPI libraries are told how to carry collectives.
_LIBRARY_VARIABLES = re.compile(
    "OMPI_MCA_coll|MPIR_CVAR_.*(COLL|REDUCE)|MPICH_.*(COLL|REDUCE)|I_MPI_(ADJUST|COLL|CBWR)|HCOLL_|UCC_"
)
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

    @staticmethod
    def modelled(latency_s: float, byte_s: float) -> Transport | None:
        """Of a link of which seconds a message and seconds a byte are given; None where both are 0."""
        if not (latency_s or byte_s):
            return None
        return Transport(latency_s, 1 / byte_s if byte_s else float("inf"))


def pinned() -> str | None:
    """The user's setting: "auto", the name of an algorithm, or None; UsageError for anything else."""
    setting = os.environ.get(VARIABLE, "").lower() or None
    if setting not in (None, *ALGORITHMS):
        raise UsageError(f"{VARIABLE}={setting} is not known; set it to one of {', '.join(ALGORITHMS)}")
    return setting


def library_settings(library: str) -> dict[str, str]:
    """What the environment tells this MPI library of its collectives; those of MPICH and its kin, which are set for
    whatever is loaded (`bindings.py`), tell Open MPI nothing."""
    others = ("MPIR_", "MPICH_", "I_MPI_") if "Open MPI" in library else ()
    names = (name for name in sorted(os.environ) if _LIBRARY_VARIABLES.match(name))
    return {name: os.environ[name] for name in names if not name.startswith(others)}


class Plan:
    """What decides a process's allreduces: the user's setting, and how fast the links between ranks were when they were
    measured. All groups whose ranks are on the same nodes share one measurement.

    Args:
        nodes: the node of every rank of the world.
        library: the MPI library, by name and version.
    """

    def __init__(self, nodes: Sequence[int], library: str = ""):
        self._nodes = nodes
        self._library = {"version": library, "settings": library_settings(library)}
        self._before: str | None = None  # the setting of the run that this one resumes
        self._measured: list[list[Any]] = []  # [ranks by node, latency_s, bytes_per_s]
        self.in_messages = False  # whether an algorithm of ours carries all, since payloads are looked at

    def setting(self) -> str:
        """The setting in force: this launch's, or that of the run that this one resumes."""
        found = pinned() or self._before or AUTO
        return DIRECT if self.in_messages and found in (AUTO, LIBRARY) else found

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
        return {
            "setting": self.setting(), "nodes": list(self._nodes), "measured": self._measured,
            "library": self._library,
        }  # fmt: skip

    def differences(self, before: dict[str, Any] | None) -> dict[str, str]:
        """Why a resumed run may add in another order than the run whose `state` was `before`: for an event."""
        noted = {}
        if pinned() is not None:
            noted["pinned"] = f"{VARIABLE}={pinned()}"
        if before is None:
            return noted
        if before["setting"] != self.setting():
            noted["before"] = before["setting"]
        elif list(before["nodes"]) != list(self._nodes) and len({*before["nodes"], *self._nodes}) > 1:
            noted["before"] = "ranks were on other nodes: sums may round otherwise"
        library = before.get("library", self._library)
        if library != self._library:
            noted["library"] = f"sums of the MPI library may round otherwise: before, it was {library}"
        return noted

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
