"""What sets the learning rates of a job: its schedule, or its torch scheduler.

Invariants: both follow accepted samples, so they mean the same under every strategy. What a run that goes on counts
from is in its checkpoint, in the first part.
"""

from __future__ import annotations

from typing import Any

from mpitrain.job import Job
from mpitrain.model.optimizer import Rates
from mpitrain.model.torch_scheduler import TorchSchedule
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.schedules import Progress, Schedule, what_changes
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.training.session import Session


def ticks_of(job: Job, epoch_samples: int, num_workers: int, batch_size: int = 0) -> Ticks:
    """What a torch scheduler of this job counts.

    Args:
        epoch_samples: in an epoch of the data; num_workers: that take one step together, under `allreduce()`.
        batch_size: of a worker's step; the job's by default.
    """
    batch_size, strategy = batch_size or job.step_samples, job.strategy
    step_samples = batch_size * num_workers
    # where a last batch is, it is of all workers
    shared = not isinstance(strategy, ServerStrategy) or strategy.reduces
    least = min(num_workers, epoch_samples) if shared else 1
    if job.drop_last and step_samples <= epoch_samples:
        least = step_samples
    return Ticks(epoch_samples, Law(batch_size, num_workers, least))


def schedule_of(job: Job | None, rates: Rates, ticks: Ticks | None) -> Progress | None:
    """The job's; None where its rates stay as they are.

    Args:
        rates: of the job's optimizer, as it began; ticks: that its torch scheduler follows, of a job.

    Raises:
        UsageError: its `scheduler` makes none.
    """
    if job is None or job.scheduler is None:
        schedule = job.schedule if job is not None else None
        assert schedule is None or isinstance(schedule, Schedule), "a job makes a value of a function"
        return schedule
    assert ticks is not None, "a job has a law"
    return TorchSchedule(job.scheduler, rates, ticks)


def go_on(
    session: Session, ticks: Ticks, schedule: Progress | None, saved: dict[str, Any] | None, samples: int
) -> None:
    """Count from what a checkpoint says, or a run before others died, and report what changes with that.

    Args:
        saved: `Ticks.state` after so many accepted samples; None of a version that kept none: then a tick was a step
            of those who wrote it.
    """
    if saved is None:
        assert session.resume is not None, "who goes on brings its ticks, or has a checkpoint"
        about = session.resume.about
        workers = about.get("options", {}).get("workers", len(session.roles.workers))
        before = ticks_of(
            session.job, ticks.epoch_samples, session.strategy.num_replicas(workers), about["batch_size"]
        )
        saved = before.state(samples)
    ticks.restore(saved)
    if changed := what_changes(schedule, ticks, Law(*saved["law"]), samples):
        session.report.event("schedule", **changed)


def report_end_of(session: Session, ticks: Ticks, schedule: Progress | None) -> None:
    """Name the tick behind which a torch scheduler that ends before the run keeps its last rates."""
    if not isinstance(schedule, TorchSchedule) or schedule.last_tick is None:
        return
    steps = session.overrides.steps
    num_ticks = ticks.at_end(session.job.epochs) if steps is None else steps
    if num_ticks - 1 > schedule.last_tick:
        session.report.event("schedule ends before the run", tick=schedule.last_tick, ticks=num_ticks)
