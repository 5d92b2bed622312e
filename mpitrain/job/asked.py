"""What a job and its options ask of a strategy, and what they are told where it, or the world, refuses that.

Invariants: why something is refused stands in `strategies/features.py`; here stands when it is asked for, and the
sentence around the reason. What depends on the model, such as its tables, is asked where the model is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain import inject
from mpitrain.errors import UsageError
from mpitrain.job.job import Job
from mpitrain.job.overrides import Overrides
from mpitrain.reporting.listeners import MLLOG, read_logs
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.features import refusal
from mpitrain.strategies.validation_policy import read_validation_policy


class Request(NamedTuple):
    """A run that is asked for."""

    job: Job
    overrides: Overrides
    num_workers: int

    def injection(self, *kinds: type[inject.Injection]) -> inject.Injection | None:
        """The first one of these kinds, or that draws them by name."""
        return next((one for one in self.overrides.injections if inject.asks_for(one, *kinds)), None)


class Asked(NamedTuple):
    """When a feature is asked for; `said`: the message, a format of the strategy, the job, the reason and, as `asked`,
    what `of` has found."""

    of: Callable[[Request], Any]
    said: str = "{strategy}: {why}"


# In the order in which they are refused.
ASKED: dict[str, Asked] = {
    "one process": Asked(lambda run: True),
    "log=mllog": Asked(lambda run: MLLOG in read_logs(run.job.log), "log='mllog' {why}: leave it out"),
    "--inject into a process": Asked(
        lambda run: run.injection(inject.Kill, inject.KillAtEnd, inject.Segv, inject.Exit, inject.Stop),
        '--inject "{asked}" {why}',
    ),
    "--inject torn": Asked(lambda run: run.injection(inject.Torn), '--inject "{asked}": {why}'),
    "--inject flip": Asked(lambda run: run.injection(inject.Flip), '--inject "{asked}": {why}'),
    "--inject flip of payloads": Asked(
        lambda run: [
            one for one in run.overrides.injections if isinstance(one, inject.Flip) and one.what == "payload"
        ],
        "--inject flip(what='payload'): {why}",
    ),
    "--inject into pushes": Asked(
        lambda run: run.injection(inject.KillAtEnd, inject.Nan, inject.Torn), '--inject "{asked}": {why}'
    ),
    "--inject into messages": Asked(
        lambda run: run.injection(inject.SlowReader), '--inject "{asked}": {why}'
    ),
    "clip_norm": Asked(lambda run: run.job.clip_norm is not None),
    "clip_value": Asked(lambda run: run.job.clip_value is not None),
    "accumulate": Asked(lambda run: run.job.accumulate > 1, "{strategy}: accumulate={job.accumulate}: {why}"),
    "accumulate, find_unused_parameters": Asked(
        lambda run: run.job.accumulate > 1 and run.job.find_unused_parameters, "{why}"
    ),
    "device": Asked(lambda run: run.overrides.device not in (None, "auto", "cpu"), "--device {why}"),
    "sync_batchnorm": Asked(lambda run: run.job.sync_batchnorm, "{strategy}: sync_batchnorm: {why}"),
    "sync_batchnorm of several workers": Asked(lambda run: run.job.sync_batchnorm and run.num_workers > 1),
    "step, on_nonfinite=skip": Asked(
        lambda run: run.job.step is not None and run.job.on_nonfinite == "skip",
        "{strategy}: several optimizers: {why}",
    ),
    "step": Asked(lambda run: run.job.step is not None, "{strategy}: several optimizers: {why}"),
    "patience": Asked(lambda run: run.job.patience is not None),
    "on_nonfinite=skip": Asked(lambda run: run.job.on_nonfinite == "skip", "{why}"),
    "--heartbeat-s": Asked(lambda run: run.overrides.heartbeat_s is not None, "--heartbeat-s is {why}"),
    "--checkpoint-pause": Asked(lambda run: run.overrides.checkpoint_pause, "--checkpoint-pause {why}"),
    "--go-back": Asked(
        lambda run: [name for name in ("go_back", "compare_every") if getattr(run.overrides, name)],
        "--go-back, --compare-every: {why}",
    ),
    "--checksums": Asked(lambda run: run.overrides.checksums, "--checksums {why}"),
    "--inject into workers": Asked(
        lambda run: [
            one
            for one in run.overrides.injections
            if inject.asks_for(one, inject.AtWorker) and not isinstance(one, inject.Flip)
        ],
        "{why}",
    ),
    "trace": Asked(lambda run: run.job.trace is not None, "--threads: {why}"),
    "validate_every in seconds": Asked(
        lambda run: read_validation_policy(run.job.validate_every).seconds,
        "validate_every={job.validate_every!r} {why}",
    ),
    "checkpoint_every": Asked(
        lambda run: run.job.checkpoint_every not in ("auto", "never", ""),
        "{strategy}: {why} checkpoint_every={job.checkpoint_every!r}",
    ),
    "over MPI": Asked(lambda run: True),
}


def check(job: Job, overrides: Overrides, world: str, num_workers: int) -> None:
    """Raise `UsageError` for what the job's strategy, or the world, cannot do of all that is asked for, or
    with so many workers."""
    strategy, run = job.strategy, Request(job, overrides, num_workers)
    assert isinstance(strategy, Strategy)
    for feature, one in ASKED.items():
        if (asked := one.of(run)) and (rule := refusal(feature, strategy, world)):
            raise UsageError(
                (rule.said or one.said).format(
                    strategy=strategy,
                    job=job,
                    asked=asked,
                    why=rule.reason(strategy),
                    num_ranks=max(2, num_workers),
                )
            )
    strategy.check_workers(num_workers)
