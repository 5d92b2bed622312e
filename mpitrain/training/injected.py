"""What `--inject` orders of this rank in a real run; of faults at a rate, which kinds it draws, and how old the run is.

Invariants: all ranks draw the same course, and each does what falls to it. The first rank says how old the run is, by
its calendar clock and the first start in `legs.jsonl`; from then on each counts seconds itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.inject import Due, Straggler, mtbf_of, orders_among
from mpitrain.inject.drawn import FILE_KINDS, Drawn, course, of_files, of_worker
from mpitrain.job.overrides import Overrides
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.strategies.features import MPI, THREADS, why_not
from mpitrain.system.files.run_directory import FIRST_PART
from mpitrain.system.legs import read_legs
from mpitrain.system.saying import tell
from mpitrain.training.fault_tolerance import survives

if TYPE_CHECKING:
    from mpitrain.job import Job
    from mpitrain.system.launched.ranks import Ranks


class Injected:
    """All that is ordered for a run. Making it is collective where faults at a rate are.

    Args:
        num_workers: of the run; run_dir: where its starts are on record.

    Raises:
        UsageError: there is nothing that this run could be hit by.
    """

    def __init__(self, runtime: Ranks, job: Job, overrides: Overrides, num_workers: int, run_dir: Path):
        self.injections, self.seed, self.num_workers = overrides.injections, job.seed, num_workers
        # what checkpoint_every="auto" counts on
        self.mtbf_s = min(job.mtbf_s, mtbf_of(self.injections))
        self.orders = orders_among(self.injections)
        self.kinds: tuple[str, ...] = ()
        if self.orders:
            self.kinds = kinds_of(runtime, job, overrides)
            legs = read_legs(run_dir) if runtime.rank == 0 else []
            age_s: float = runtime.broadcast(max(0.0, time.time() - legs[0].began_s) if legs else 0.0)
            self._since_s: float = time.monotonic() - age_s

    def straggler(self, index: int) -> Straggler:
        """What is ordered for the worker with this index."""
        return Straggler(self.injections, index, self.seed, self._due(of_worker(index)))

    def of_part(self, part: str) -> Callable[[], list[str]]:
        """What has fallen due of a part's writes since it was asked last; the first part is hit."""
        due = self._due(of_files) if part == FIRST_PART else None
        return due.take if due else list

    def _due(self, is_mine: Callable[[Drawn], bool]) -> Due | None:
        courses = [course(one, self.seed, self.kinds, self.num_workers) for one in self.orders]
        return Due(courses, self._age_s, is_mine, self._told) if courses else None

    def _age_s(self) -> float:
        return time.monotonic() - self._since_s

    def _told(self, fault: Drawn) -> None:
        whom = "the next checkpoint" if fault.kind in FILE_KINDS else f"worker {fault.worker}"
        tell(
            f"mpitrain: injected: {fault.kind} of {whom}, fault {fault.number} of the run, {self._age_s():.1f} s old"
        )


def kinds_of(runtime: Ranks, job: Job, overrides: Overrides) -> tuple[str, ...]:
    """The kinds that such a run survives, or is started again from; of those that make a run stand still only where
    `--watchdog-s` says for how long.

    Raises:
        UsageError: none.
    """
    strategy, over_mpi = job.run_strategy, runtime.num_threads is None
    world = MPI if over_mpi else THREADS
    writes = not read_policy(job.checkpoint_every, job.mtbf_s).is_never and not strategy.never_meets
    goes_on = writes or survives(runtime, strategy)
    ends_hangs = 0 < overrides.watchdog_s < Overrides.watchdog_s
    kinds: list[str] = []
    if goes_on and not why_not("--inject into workers", strategy, world):
        kinds += ["kill", "segv"] * over_mpi + ["raise"]
        kinds += ["exit"] * (over_mpi and runtime.fault_tolerance == "none")
        kinds += ["stop"] * (over_mpi and ends_hangs) + ["wedge"] * ends_hangs
        if strategy.has_servers:
            kinds += ["nan"] * (job.on_nonfinite == "skip") + ["torn"] * (over_mpi and writes)
    kinds += FILE_KINDS if writes else ()
    if not kinds and not all(one.asked for one in orders_among(overrides.injections)):
        raise UsageError(
            '--inject "poisson(...)": this run survives no death, and writes no checkpoints to be started again from: '
            "set --checkpoint-every, or name what is drawn by kinds="
        )
    return tuple(kinds)
