"""What sets the learning rates of a job: its schedule, or its torch scheduler.

Invariants: both follow accepted samples, so they mean the same under every strategy.
"""

from __future__ import annotations

from mpitrain.job import Job
from mpitrain.model.optimizer import Rates
from mpitrain.model.torch_scheduler import TorchSchedule
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.schedules import Progress, Schedule


def schedule_of(job: Job | None, rates: Rates, epoch_samples: int, num_workers: int) -> Progress | None:
    """The job's; None where its rates stay as they are.

    Args:
        rates: of the job's optimizer, as it began.
        epoch_samples: in an epoch of the data; num_workers: that take one step together, under `allreduce()`.

    Raises:
        UsageError: its `scheduler` makes none.
    """
    if job is None or job.scheduler is None:
        schedule = job.schedule if job is not None else None
        assert schedule is None or isinstance(schedule, Schedule), "a job makes a value of a function"
        return schedule
    step_samples = job.step_samples * num_workers
    rest = epoch_samples % step_samples
    strategy = job.strategy
    # where a last batch is, it is of all workers
    shared = not isinstance(strategy, ServerStrategy) or strategy.reduces
    left_out = rest < epoch_samples and (job.drop_last or (shared and rest < num_workers))
    accepted = epoch_samples - rest if left_out else epoch_samples
    return TorchSchedule(job.scheduler, rates, epoch_samples, step_samples, accepted)
