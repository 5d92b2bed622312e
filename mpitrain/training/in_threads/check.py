"""What threads of one process cannot carry, and why; asked before any of them starts."""

from __future__ import annotations

from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.system.launch_variables import launched_task
from mpitrain.threads.ranks import check_injections


def check_launch(num_threads: int) -> None:
    """Refuse threads in each of several ranks.

    Raises:
        UsageError: says how many ranks there are.
    """
    if num_threads < 1:
        raise UsageError(f"--threads must be at least 1, got {num_threads}")
    task = launched_task()
    if task is not None and task.is_one_of_several():
        ranks = task.size or f"at least {task.rank + 1}"
        raise UsageError(
            f"--threads {num_threads} trains in one process, and this launch has {ranks} ranks: start it without a "
            "launcher, or leave --threads out and train over MPI"
        )


def check_job(job: Job, overrides: Overrides, num_threads: int) -> None:
    """Refuse what replicas in one process cannot do.

    Raises:
        UsageError: names it, and what to do instead.
    """
    strategy = job.strategy
    if isinstance(strategy, Split):
        raise UsageError(
            f"{strategy}: --threads trains whole models, one a thread, and this strategy cuts one model among ranks: "
            f"run it over MPI (mpitrain launch -n {max(2, num_threads)} train ...)"
        )
    if strategy is not None and strategy.aggregates:
        raise UsageError(
            f"{strategy}: between threads no message travels, so there is nothing to aggregate: leave aggregate out"
        )
    if isinstance(strategy, AllReduce) and not strategy.codec.is_none:
        raise UsageError(
            f"{strategy}: between threads no gradient travels, so a codec has nothing to make smaller: leave codec out"
        )
    if job.step is not None:
        raise UsageError(
            "--threads: a step function with several optimizers exchanges gradients in its middle, while it draws from "
            "the one random generator of the process: run it over MPI"
        )
    if job.sync_batchnorm:
        raise UsageError(
            "--threads: sync_batchnorm exchanges statistics in the middle of a forward pass through torch.distributed, "
            "which knows processes and no threads: leave it out, or run over MPI"
        )
    if job.trace is not None:
        raise UsageError(
            "--threads: a trace is of a process with one rank: leave --trace out, run over MPI, or look at the process "
            "with a profiler of threads"
        )
    check_injections(overrides.injections)
