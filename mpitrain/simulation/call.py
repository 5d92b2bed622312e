"""`mt.simulate`: a job in virtual time, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.options import check_not_reading
from mpitrain.reporting.fom import SILENT
from mpitrain.simulation.comparison import Comparison
from mpitrain.simulation.servers import simulate_again, simulate_job
from mpitrain.strategies.base import Strategy
from mpitrain.system.interrupts import interruptible
from mpitrain.virtual import ComputeLaw, Constant, Costs, Ideal, NetworkLaw


@interruptible()
def simulate(
    job: Job,
    strategy: Strategy | None = None,
    workers: int = 4,
    compute: ComputeLaw = Constant(),  # noqa: B008 - frozen
    network: NetworkLaw = Ideal(),  # noqa: B008 - frozen
    replay: str | None = None,
    costs: Costs = Costs(),  # noqa: B008 - frozen
    timing_only: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Train `job` with `workers` virtual workers (servers come on top) and return what `result.json` holds.

    With `replay`, the directory of a real run of this job over parameter servers, its updates are repeated in
    their recorded order, and `replay_identical` says whether the parameters came out the same to the bit.
    With `timing_only` roles run without gradients: there is no loss and no model, and thousands of workers take
    seconds. A directory is written for `trace` alone. With `quiet=True` nothing is printed but why a run has failed.

    Raises:
        UsageError: a strategy that has no roles to run in virtual time, or a wrong option.
    """
    check_not_reading("simulate")
    if strategy is not None:
        overrides["strategy"] = str(strategy)
    if overrides.get("quiet"):
        overrides["quiet"] = SILENT
    options = Overrides(**overrides)
    if replay is not None:
        if timing_only:
            raise UsageError("replay repeats a recorded run with its gradients: leave out timing_only")
        return simulate_again(Path(replay), options, job)
    job = apply_overrides(job, options)
    if not timing_only:
        return simulate_job(job, options, workers, compute, network, costs)
    timing = Comparison(job, options, compute, network, costs, timing_only=True)
    found = timing.timed(job.run_strategy, workers, timing.run_dir)
    return found | ({} if job.trace is None else {"run_dir": str(timing.run_dir)})
