"""A plan, looked at as a whole before anything starts: every configuration is read as `train` would read it.

Invariants: what is refused here would have been refused by the run: options, parameters of the job file, strategies,
the number of ranks, the data, and the metric that configurations are compared by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.reporting.targets import LOSS, Choice, choice_by_name, read_choice
from mpitrain.search.sweep.asha import RULE_KIND, Asha
from mpitrain.search.sweep.plan import Configuration, Plan
from mpitrain.search.sweep.proposals import check_installed
from mpitrain.strategies.placement import assign
from mpitrain.training.job_file import load_job
from mpitrain.training.validate import validate_run
from mpitrain.values import parse

Read = Callable[[Sequence[str]], tuple[Overrides, Sequence[str]]]


@dataclass(frozen=True)
class Setup:
    """A plan that can be carried out.

    Attributes:
        by: what configurations are compared by; None where the job measures nothing.
        num_samples: of the training set. reduction: of the rule of early stopping, 0 without one.
    """

    plan: Plan
    configurations: tuple[Configuration, ...]
    by: Choice | None
    num_samples: int
    reduction: int = 0


def examine(plan: Plan, read: Read) -> Setup:
    """The plan with all that follows from the job.

    Args:
        read: what the words of `train` mean; raises UsageError.

    Raises:
        UsageError: as the run of a configuration would, with its number and options; or the plan makes no sense.
    """
    plan.check()
    if plan.sampler == "optuna":
        check_installed()
    configurations = plan.configurations()
    jobs: dict[tuple[str, ...], Job] = {}
    first: Job | None = None
    epochs = set()
    for one in configurations or _extremes(plan):
        try:
            overrides, settings = read([*plan.words, *one.words])
            key = tuple(settings)
            if key not in jobs:
                jobs[key] = load_job(plan.job, settings)
            job = apply_overrides(jobs[key], overrides)
            _check_run(job, overrides, plan.ranks_per_run)
        except UsageError as error:
            raise UsageError(f"configuration {one.number} ({one.text}): {error}") from error
        first = first or job
        epochs.add(job.epochs)
    assert first is not None
    by = _choice(plan, first)
    rungs, reduction = _rungs(plan, by, epochs)
    resolved = dataclasses.replace(plan, metric=_text(by) if by else "", rungs=rungs)
    num_samples = first.data.scan().num_samples
    return Setup(resolved, tuple(configurations), by, num_samples, reduction)


def _extremes(plan: Plan) -> Iterable[Configuration]:
    """What a sampler may propose: of every law both ends, of every list each value, a few at a time."""
    ends = [
        axis.values if law is None else tuple(law.draw(unit) for unit in (0.0, 1 - 1e-9))
        for axis in plan.axes
        for law in [axis.distribution]
    ]
    for index in range(max(map(len, ends))):
        setting = tuple(
            (axis.name, values[index % len(values)]) for axis, values in zip(plan.axes, ends, strict=True)
        )
        yield plan.repeated(index, setting)


def _check_run(job: Job, overrides: Overrides, num_ranks: int) -> None:
    strategy = job.run_strategy
    roles = assign(
        (0,) * num_ranks, strategy.num_servers(), strategy.placement, aggregates=strategy.aggregates
    )
    validate_run(job, overrides, len(roles.workers))


def _choice(plan: Plan, job: Job) -> Choice | None:
    """What is asked for, or what the job chooses its best model by, or its first target, or the loss."""
    if job.validate is None:
        if plan.metric or plan.asha or plan.sampler == "optuna":
            raise UsageError(
                "--metric, --asha and --sampler optuna compare what validations measure, and the job has no validate= "
                "(nor has --synthetic)"
            )
        return None
    if plan.metric:
        return read_choice(plan.metric, what="--metric")
    if job.best_by is not None:
        return job.best_by
    return choice_by_name(next(iter(job.target), LOSS))


def _text(by: Choice) -> str:
    return f"{'<' if by.less_is_better else '>'}{by.metric}"


def _rungs(plan: Plan, by: Choice | None, epochs: set[int]) -> tuple[tuple[int, ...], int]:
    if not plan.asha:
        return (), 0
    rule = parse(plan.asha, RULE_KIND)
    assert isinstance(rule, Asha)
    if len(epochs) > 1:
        raise UsageError(
            f"--asha: the configurations train for {sorted(epochs)} epochs; leave epochs out of --vary"
        )
    if any(word.startswith("--steps") for word in plan.words) or any(
        axis.name == "steps" for axis in plan.axes
    ):
        raise UsageError("--asha: rungs are counted in epochs, so leave --steps out")
    return rule.rungs(epochs.pop()), rule.reduction
