"""A sweep as a Slurm array: every element is a node whose ranks take what is left, several runs at a time.

Invariants: the elements are all alike and deal from one journal, so it does not matter how many of them run at once,
nor in which order, nor which of them is lost. What is submitted has been checked as a whole before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.search.sweep.check import Setup
from mpitrain.search.sweep.deal import standings
from mpitrain.search.sweep.journal import Sweep
from mpitrain.slurm import Script, submit
from mpitrain.slurm.script import make, render

_OURS = ("kind", "job", "options", "sweep", "server_nodes", "server_partition")


def script_of(sweep: Sweep, setup: Setup, runs_per_node: int, settings: Mapping[str, object]) -> Script:
    """The batch script for what is left of a sweep.

    Args:
        settings: of the script, such as time and partition, by the names of `mpitrain slurm render --set`.

    Raises:
        UsageError: a setting is not known, makes no sense, or is the sweep's own.
    """
    for name in _OURS:
        if name in settings:
            raise UsageError(f"--slurm-set {name} follows from the sweep: leave it out")
    ranks = runs_per_node * setup.plan.ranks_per_run
    given = {
        "gpus_per_node": 0,
        "name": Path(setup.plan.job).stem,
        "array": _array(sweep, setup, runs_per_node),
    }
    return make("sweep", job=str(sweep.folder.absolute()), options=(str(ranks),), **{**given, **settings})


def _array(sweep: Sweep, setup: Setup, runs_per_node: int) -> str | None:
    """As many elements as are busy with one run at each place; each goes on as long as there is something to do."""
    plan = setup.plan
    found = standings(sweep.records(), plan.num_configurations, plan.num_rungs)
    left = sum(one.status in ("open", "running") for one in found)
    num_nodes = math.ceil(left / runs_per_node)
    return f"0-{num_nodes - 1}" if num_nodes > 1 else None


def hand_in(script: Script) -> str:
    """Submit; returns the job id.

    Raises:
        UsageError: there is no sbatch here, or it refused.
    """
    return submit(render(script))
