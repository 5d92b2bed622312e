"""What sets the learning rates of a job: its schedule, or its torch scheduler.

Invariants: both follow accepted samples, so they mean the same under every strategy. What a run that goes on counts
from is in its checkpoint, in the first part.
"""

from __future__ import annotations

from typing import Any

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.model.recipe import UpdateRule
from mpitrain.reporting.report import NullReport
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.features import MPI, why_not
from mpitrain.strategies.schedules import Pace, what_changes
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.strategies.validation_policy import read_validation_policy
from mpitrain.training.recipe import law_of
from mpitrain.training.session import Session


def goes_by_figures(job: Job, rule: UpdateRule, rates: Rates, strategy: Strategy, world: str = MPI) -> bool:
    """Whether the rates follow what validations measure.

    Raises:
        UsageError: the job's scheduler is none, or goes by a metric that is not measured, or that not all can be told;
            or the job names a metric, and its scheduler goes by none.
    """
    if rule.pace(rates).figures is None:
        if job.scheduler_metric is not None:
            raise UsageError(
                f"Job: scheduler_metric={job.scheduler_metric!r}: the scheduler is stepped once for every full batch "
                "and goes by no metric; leave it out, or use torch.optim.lr_scheduler.ReduceLROnPlateau"
            )
        return False
    seconds = read_validation_policy(job.validate_every).seconds
    for feature in ("scheduler by a metric", *(["scheduler by a metric by the clock"] if seconds else [])):
        if why := why_not(feature, strategy, world):
            raise UsageError(f"{strategy}: {why}")
    return True


def go_on(session: Session, pace: Pace, state: dict[str, Any], samples: int) -> None:
    """Count from what a checkpoint says, or a run before others died, and report what changes with that.

    Args:
        state: as of `Pace.state`, after so many accepted samples; that of a version that kept no ticks has none: then
            one was a step of those who wrote it.
    """
    ticks, saved = pace.ticks, state.get("ticks")
    assert ticks is not None, "of a job"
    if pace.figures is not None:
        pace.figures.take_rows(state.get("figures") or ())
    if saved is None:
        assert session.resume is not None, "who goes on brings its ticks, or has a checkpoint"
        about = session.resume.about
        workers = about.get("options", {}).get("workers", len(session.roles.workers))
        num_replicas = session.strategy.num_replicas(workers)
        law = law_of(session.job, ticks.epoch_samples, num_replicas, about["batch_size"])
        saved = Ticks(ticks.epoch_samples, law).state(samples)
    ticks.restore(saved)
    if changed := what_changes(pace.schedule, ticks, Law(*saved["law"]), samples):
        session.report.event("schedule", **changed)


def report_end_of(session: Session, pace: Pace) -> None:
    """Name the tick behind which a torch scheduler that ends before the run keeps its last rates; and warn of one that
    counts steps where it was made to count epochs, as in a loop that steps it at the end of each."""
    schedule, epochs = pace.schedule, session.job.epochs
    if isinstance(session.report, NullReport):  # to look ahead costs thousands of the scheduler's steps
        return
    if not isinstance(schedule, TorchSchedule) or schedule.figures is not None:
        return
    num_ticks = schedule.num_ticks(epochs, session.overrides.steps)
    if schedule.last_tick is not None and num_ticks - 1 > schedule.last_tick:
        session.report.event("schedule ends before the run", tick=schedule.last_tick, ticks=num_ticks)
    if schedule.counts_steps and (found := schedule.spent_at(num_ticks, epochs)):
        tick, peak, rate = found
        session.report.event(
            "warning",
            text=f"scheduler: the rate falls from {peak:.4g} to {rate:.4g} within {tick} of the run's {num_ticks} "
            "steps, after each of which it is stepped; one that counts epochs is "
            "scheduler=mpitrain.PerEpoch(lambda optimizer: ...)",
        )
