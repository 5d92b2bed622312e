"""The fault tolerance of a run: what a worker's death costs, as the run's report names it.

Invariants: the answer holds for this launch and this strategy together, and promises nothing that was not seen to work.
Peers, split models and `hybrid` end with a dead rank under ULFM too, and what aggregates on nodes takes no such launch.
Under MPICH server strategies survive a worker's death where srun leaves the other ranks alone; everywhere else it ends
the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.features import MPI, why_not

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks


def survives(runtime: Ranks, strategy: Strategy) -> bool:
    """Whether the other ranks go on inside the job when a worker dies."""
    if runtime.fault_tolerance == "heartbeat" and not strategy.has_servers:
        return False
    return runtime.fault_tolerance in ("heartbeat", "ulfm") and not strategy.needs_all


def may_miss(runtime: Ranks, strategy: Strategy) -> bool:
    """Whether some ranks may be missing at the end: dead, or given up as silent, as servers do in every launch. Then
    nothing at the end may need all ranks."""
    if runtime.fault_tolerance == "none" and runtime.num_threads is None:
        return strategy.has_servers and not strategy.needs_all
    return strategy.has_servers or survives(runtime, strategy)


def level(runtime: Ranks, strategy: Strategy) -> str:
    """What a worker's death costs: "ulfm", nothing, the others go on; "heartbeat", the same once it counts as silent;
    "restart", the job ends, and the launcher starts it again from its newest checkpoint."""
    return str(runtime.fault_tolerance) if survives(runtime, strategy) else "restart"


def warning(runtime: Ranks, strategy: Strategy) -> str:
    """The warning for a launch in which all ranks would wait for a dead one for ever; empty for any other."""
    if runtime.fault_tolerance != "heartbeat" or survives(runtime, strategy):
        return ""
    return (
        f"this launch does not end when a rank dies, and {strategy} cannot go on without one: only --watchdog-s ends "
        "such a run. Leave out --ft heartbeat (MPITRAIN_FT), or take a strategy with servers"
    )


def check_aggregated(runtime: Ranks, strategy: Strategy) -> None:
    """Raise `UsageError` where a launch is to survive deaths, and the workers of a node have one rank in common."""
    if runtime.fault_tolerance != "none" and (why := why_not("--ft", strategy, MPI)):
        raise UsageError(
            f"--ft {runtime.fault_tolerance} (MPITRAIN_FT) goes on without a rank that dies, and {why}"
        )


def check_own_loop(runtime: Ranks) -> None:
    """Raise `UsageError` where a loop of the user's own would wait for a dead rank for ever."""
    if runtime.fault_tolerance == "heartbeat":
        raise UsageError(
            "--ft heartbeat (MPITRAIN_FT) cannot watch a loop of your own: nobody knows how long its batches may take, "
            "so a dead worker looks like a slow one; leave the option out, or make the loop a job"
        )
