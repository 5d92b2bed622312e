"""What a run has cost, over all its starts: hours, nodes and energy, and what its time went to.

Invariants: rank 0 writes, one rank a node counts its energy, and what nobody counts is None, never 0.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mpitrain.reporting.report import METRICS_FILE
from mpitrain.system.energy import EnergyMeter
from mpitrain.system.launched.ranks import Ranks
from mpitrain.system.legs import FILE, begin_leg, end_leg, joules_by_slurm, read_legs, totals
from mpitrain.system.optional import optional
from mpitrain.system.processes import age_s
from mpitrain.system.time_spent import FILE as SPENT_FILE
from mpitrain.system.time_spent import TimeSpent, goodput, read_spent


class Account:
    """Of one start, on every rank.

    Args:
        attempt: id of the start.

    Attributes:
        spent: what the time goes to, on the rank that reports; None where it cannot be written.
    """

    _has_had_one: ClassVar[bool] = False  # this process, a run

    def __init__(self, runtime: Ranks, run_dir: Path, attempt: str) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        first = dict(
            reversed(list(zip(runtime.nodes, runtime.hosts)))
        )  # a host may be several nodes of a Slurm
        self._hosts = [first[node] for node in sorted(first)]
        self._is_first = runtime.rank == 0
        self._meter = EnergyMeter() if runtime.local_rank == 0 else None
        self.spent: TimeSpent | None = None

    def begin(self, source: Path | None, samples: int = 0, is_command: bool = False) -> None:
        """Write the start down, on rank 0, before anything of it is reported.

        Args:
            source: the run directory from whose checkpoint it goes on; samples: accepted ones by then.
            is_command: this process was started for the run.
        """
        if self._is_first:
            with optional(self._run_dir / FILE):
                begin_leg(self._run_dir, self._attempt, self._hosts, self._run_dir / METRICS_FILE, source)
            if source is not None and source.resolve() != self._run_dir.resolve():
                with contextlib.suppress(OSError):
                    shutil.copyfile(source / SPENT_FILE, self._run_dir / SPENT_FILE)
            began_s = age_s() if is_command and not Account._has_had_one else 0.0
            Account._has_had_one = True
            self._spend(samples, began_s)

    def lead(self) -> None:
        """This rank reports from here on, in place of one that was lost."""
        self._spend(None, 0.0)

    def _spend(self, samples: int | None, began_s: float) -> None:
        with optional(self._run_dir / SPENT_FILE):
            self.spent = TimeSpent(self._run_dir, self._attempt, samples, began_s)
            self.spent.keep_writing()

    def counted(self) -> dict[str, Any]:
        """This rank's part of the account, for rank 0: it has taken its last step."""
        if self.spent is not None:
            self.spent.end()
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
        if self.spent is not None:
            with optional(self._run_dir / SPENT_FILE):
                self.spent.write()
        return {**totals(read_legs(self._run_dir), source), "goodput": goodput(read_spent(self._run_dir))}

    def close(self) -> None:
        """Nothing more is counted."""
        if self.spent is not None:
            self.spent.close()
