"""What a run has cost, over all its starts: hours, nodes and energy.

Invariants: rank 0 writes, one rank a node counts its energy, and what nobody counts is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.reporting.report import METRICS_FILE
from mpitrain.system.energy import EnergyMeter
from mpitrain.system.launched.ranks import Ranks
from mpitrain.system.legs import FILE, begin_leg, end_leg, joules_by_slurm, read_legs, totals
from mpitrain.system.optional import optional


class Account:
    """Of one start, on every rank.

    Args:
        attempt: id of the start.
    """

    def __init__(self, runtime: Ranks, run_dir: Path, attempt: str) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        first = dict(
            reversed(list(zip(runtime.nodes, runtime.hosts)))
        )  # a host may be several nodes of a Slurm
        self._hosts = [first[node] for node in sorted(first)]
        self._is_first = runtime.rank == 0
        self._meter = EnergyMeter() if runtime.local_rank == 0 else None

    def begin(self, source: Path | None) -> None:
        """Write the start down, on rank 0, before anything of it is reported.

        Args:
            source: the run directory from whose checkpoint it goes on.
        """
        if self._is_first:
            with optional(self._run_dir / FILE):
                begin_leg(self._run_dir, self._attempt, self._hosts, self._run_dir / METRICS_FILE, source)

    def counted(self) -> dict[str, Any]:
        """This rank's part of the account, for rank 0."""
        if self._meter is None:
            return {}
        self._meter.stop()
        return {"joules": self._meter.joules()}

    def end(self, parts: Sequence[dict[str, Any]], wall_s: float, lost: bool = False) -> dict[str, Any]:
        """Write the end down, on rank 0; returns what `result.json` says of all starts.

        Args:
            parts: what `counted` has said on every rank that answers; lost: whether others do not.
        """
        # Slurm asks every node of the step, and waits for one that is gone.
        source, joules = "slurm", None if lost else joules_by_slurm()
        if joules is None:
            nodes = [part["joules"] for part in parts if "joules" in part]
            source, joules = "rapl", sum(nodes) if nodes and None not in nodes else None
        with optional(self._run_dir / FILE):
            end_leg(self._run_dir, self._attempt, wall_s, joules)
        return totals(read_legs(self._run_dir), source)
