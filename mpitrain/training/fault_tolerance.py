"""How much a run survives, named in its report.

Invariants: what is said holds for this launch and this strategy together, and nothing more is promised than was
seen to work. Peers and split models end with a dead rank under ULFM too; under MPICH a worker's death is survived where
srun leaves the others alone, by server strategies, and ends the job everywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.local_sgd import LocalSGD

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


def survives(runtime: Runtime, strategy: Strategy) -> bool:
    """Whether the others go on inside the job when a worker dies."""
    if runtime.fault_tolerance == "heartbeat":
        return isinstance(strategy, ServerStrategy)
    return runtime.fault_tolerance == "ulfm" and isinstance(strategy, ServerStrategy | AllReduce | LocalSGD)


def level(runtime: Runtime, strategy: Strategy) -> str:
    """What a worker's death costs: "ulfm", nothing, the others go on; "heartbeat", the same once it counts as silent;
    "restart", the job ends, and the launcher starts it again from its newest checkpoint."""
    return str(runtime.fault_tolerance) if survives(runtime, strategy) else "restart"


def warning(runtime: Runtime, strategy: Strategy) -> str:
    """What to tell of a launch that leaves everybody waiting for the dead; empty for any other."""
    if runtime.fault_tolerance != "heartbeat" or survives(runtime, strategy):
        return ""
    return (
        f"this launch does not end when a rank dies, and {strategy} cannot go on without one: only --watchdog-s ends "
        "such a run. Leave out --ft heartbeat (MPITRAIN_FT), or take a strategy with servers"
    )


def check_own_loop(runtime: Runtime) -> None:
    """Raise `UsageError` where a loop of the user's own would wait for the dead for ever."""
    if runtime.fault_tolerance == "heartbeat":
        raise UsageError(
            "how long a batch of a loop that is not ours may take nobody knows, so its dead cannot be told from its "
            "slow: leave out --ft heartbeat (MPITRAIN_FT), or make the loop a job"
        )
