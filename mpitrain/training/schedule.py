"""What sets the learning rates of a job: its schedule, or its torch scheduler.

Invariants: both follow accepted samples, so they mean the same under every strategy. What a run that goes on counts
from is in its checkpoint, in the first part.
"""

from __future__ import annotations

from typing import Any

from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.strategies.schedules import Pace, what_changes
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.training.recipe import law_of
from mpitrain.training.session import Session


def go_on(session: Session, pace: Pace, saved: dict[str, Any] | None, samples: int) -> None:
    """Count from what a checkpoint says, or a run before others died, and report what changes with that.

    Args:
        saved: `Ticks.state` after so many accepted samples; None of a version that kept none: then a tick was a step
            of those who wrote it.
    """
    ticks = pace.ticks
    assert ticks is not None, "of a job"
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
    """Name the tick behind which a torch scheduler that ends before the run keeps its last rates."""
    schedule, ticks = pace.schedule, pace.ticks
    if ticks is None or not isinstance(schedule, TorchSchedule) or schedule.last_tick is None:
        return
    steps = session.overrides.steps
    num_ticks = ticks.at_end(session.job.epochs) if steps is None else steps
    if num_ticks - 1 > schedule.last_tick:
        session.report.event("schedule ends before the run", tick=schedule.last_tick, ticks=num_ticks)
