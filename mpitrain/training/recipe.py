"""What a job asks of gradients and of updates, as the two values that every family is handed."""

from __future__ import annotations

from mpitrain.job import Job
from mpitrain.model.gradient.clipping import NO_CLIPPING, Clipping
from mpitrain.model.recipe import NO_NOISE, GradientRule, Noise, Recipe, UpdateRule
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.schedules import Schedule
from mpitrain.strategies.ticks import Law
from mpitrain.training.session import Session


def recipe_of(job: Job | None, strategy: Strategy, num_workers: int, epoch_samples: int) -> Recipe:
    """The recipe of a job.

    Args:
        job: None for a loop of the user's own, which clips and sets rates by itself.
        num_workers: that take one step together; epoch_samples: in an epoch of the data.
    """
    if job is None:
        return Recipe(update=UpdateRule(law=Law(1, num_workers)))
    clipping = Clipping(job.clip_norm, job.clip_value)
    own, stepped = (NO_CLIPPING, clipping) if strategy.clips_mean else (clipping, NO_CLIPPING)
    # of gradients that a codec averages, too: noise is none of what it keeps back
    noise, on_mean = Noise(job.gradient_noise or 0.0, job.seed), strategy.clips_mean or strategy.all_reduces
    own_noise, stepped_noise = (NO_NOISE, noise) if on_mean else (noise, NO_NOISE)
    schedule = job.schedule
    assert schedule is None or isinstance(schedule, Schedule), "a job makes a value of a function"
    part_samples = strategy.samples_at_once(job.part_samples, num_workers)
    return Recipe(
        GradientRule(job.loss, job.seed, job.precision, part_samples, own, own_noise, job.step),
        UpdateRule(
            stepped, schedule, job.scheduler, job.ema, job.on_nonfinite, epoch_samples,
            law_of(job, epoch_samples, num_workers), stepped_noise, job.goes_by,
        ),
    )  # fmt: skip


def recipe_of_steps(session: Session) -> Recipe:
    """The recipe of a run whose ranks take the same steps."""
    num_replicas = session.strategy.num_replicas(session.runtime.size)
    return recipe_of(session.job, session.strategy, num_replicas, session.catalogue.num_samples)


def law_of(job: Job, epoch_samples: int, num_workers: int, batch_size: int = 0) -> Law:
    """What a step of all is.

    Args:
        num_workers: that take it together, under `allreduce()`; batch_size: of a worker; the job's by default.
    """
    batch_size, strategy = batch_size or job.step_samples, job.strategy
    step_samples = batch_size * num_workers
    # where a last batch is, it is of all workers
    shared = strategy is None or strategy.reduces or not strategy.has_servers
    least = min(num_workers, epoch_samples) if shared else 1
    if job.drop_last and step_samples <= epoch_samples:
        least = step_samples
    return Law(batch_size, num_workers, least)
