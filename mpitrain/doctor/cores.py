"""How much of its cores a node's processes may have: the quota of the control groups around them, and their affinity.

Invariants: a limit that cannot be found out is none. A group with less than one core's time, or with less than half of
the cores that the batch system says it has given, makes a node unfit; that a group has been held up is told, since a
quota of some cores with more threads is held up on healthy nodes, too. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from mpitrain.doctor.checks import Unfit, Wanted
from mpitrain.system.control_groups import groups_around

_GIVEN = ("SLURM_CPUS_ON_NODE", "NCPUS")  # Slurm's, PBS's


class Periods(NamedTuple):
    """Time slices of a control group so far, and those in which it was held up."""

    all: int
    throttled: int


def check_cores(wanted: Wanted) -> str:
    """Cores that this process may use, and what part of their time its control groups leave it."""
    affinity, quota = len(os.sched_getaffinity(0)), quota_cores()
    given = given_cores()
    if quota is not None:
        least = max(1.0, given / 2)
        if quota < least:
            raise Unfit(
                f"the control group leaves {quota:.2g} of a core's time on {affinity} cores (cpu.max), "
                f"{least:.2g} wanted at least"
            )
        return f"{affinity} cores, of which the control group leaves the time of {quota:.3g}"
    asked = f" of {given} that were given" if given > affinity else ""
    return f"{affinity} cores{asked}"


def given_cores(environ: Mapping[str, str] = os.environ) -> int:
    """What the batch system says; 0 where none does."""
    return next((int(environ[name]) for name in _GIVEN if environ.get(name, "").isdecimal()), 0)


def quota_cores() -> float | None:
    """The least quota of all control groups around this process, in cores; None without one."""
    found = []
    for folder, _ in groups_around("cpu"):
        try:
            if (folder / "cpu.max").exists():
                most, period = (folder / "cpu.max").read_text().split()
            else:
                most = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if float(most) > 0 < float(period):
                found.append(float(most) / float(period))
        except (OSError, ValueError):  # none there, or "max"
            continue
    return min(found, default=None)


def throttled_periods() -> Periods:
    """Of the control group around this process that was held up most."""
    found = [Periods(0, 0)]
    for folder, _ in groups_around("cpu"):
        try:
            lines = (folder / "cpu.stat").read_text().splitlines()
            facts = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
            found.append(Periods(int(facts["nr_periods"]), int(facts["nr_throttled"])))
        except (OSError, ValueError, KeyError):
            continue
    return max(found, key=lambda one: one.throttled)


def share_throttled(before: Periods, after: Periods) -> float:
    """Of the time slices in between, 0 where there were none."""
    slices = after.all - before.all
    return max(0.0, min(1.0, (after.throttled - before.throttled) / slices)) if slices > 0 else 0.0
