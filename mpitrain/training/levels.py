"""How much a run survives, named in its report.

Law of this file: what is said holds for this launch and this strategy together, and nothing more is promised than was
seen to work. Peers and split models end with a dead rank under ULFM too; under MPICH a worker's death ends the job at
every launcher that `mpitrain launch` starts.
"""

from __future__ import annotations

from typing import Any

from mpitrain.rules import AllReduce, LocalSGD, ServerStrategy, Strategy


def survives(runtime: Any, strategy: Strategy) -> bool:
    """Whether the others go on inside the job when a worker dies."""
    return runtime.fault_tolerance == "ulfm" and isinstance(strategy, ServerStrategy | AllReduce | LocalSGD)


def level(runtime: Any, strategy: Strategy) -> str:
    """What a worker's death costs: "ulfm", nothing, the others go on; "restart", the job ends, and the launcher starts
    it again from its newest checkpoint."""
    return "ulfm" if survives(runtime, strategy) else "restart"
