"""What the command line changes of a job.

Invariants: a job is never changed in place: its fields are overridden by making another job.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

from mpitrain import inject as injection
from mpitrain.errors import UsageError
from mpitrain.job.job import CLIPPED, VALIDATED, Job, check_limit, check_precision
from mpitrain.reporting.listeners import read_logs
from mpitrain.reporting.targets import option_text, read_option
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.system.trace import read_steps
from mpitrain.values import parse

AUTO_WHERE = (
    "--resume auto goes on with the run in --run-dir, and none is given, so every start has a new one; say --run-dir "
    "DIR, or --resume DIR to go on from the run in DIR"
)


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What the command line changes; None leaves the job's own value."""

    strategy: str | None = None
    schedule: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int | None = None
    precision: str | None = None
    seed: int | None = None
    run_dir: str | None = None
    synthetic: bool = False
    steps: int | None = None
    target: tuple[str, ...] = ()
    validate_every: int | str | None = None
    keep_best: str | None = None
    patience: int | None = None
    ema: float | None = None
    validate_ema: bool = False
    quiet: bool = False
    inject: tuple[str, ...] = ()
    checkpoint_every: str | None = None
    resume: str | None = None
    watchdog_s: float = 900.0
    heartbeat_s: float | None = None
    init: str | None = None
    init_partial: bool = False
    log: tuple[str, ...] = ()
    log_every: int | None = None
    trace: str | None = None
    fold: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inject", injection.texts(self.inject))
        if self.init is not None:
            object.__setattr__(self, "init", os.fspath(self.init))
        object.__setattr__(self, "log", read_logs(self.log))
        given: Any = self.target
        pairs = given.items() if isinstance(given, Mapping) else ()
        texts = [option_text(*pair) for pair in pairs] or ([given] if isinstance(given, str) else given)
        object.__setattr__(self, "target", tuple(texts))

    @property
    def injections(self) -> tuple[injection.Injection, ...]:
        """What `inject` orders, as values."""
        return injection.read(self.inject)

    def check(self) -> None:
        """Refuse values that no run can have.

        Raises:
            UsageError: names the option and the value.
        """
        for key in ("epochs", "batch_size", "accumulate", "steps", "log_every"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UsageError(f"--{key.replace('_', '-')} must be at least 1, got {value}")
        if self.lr is not None and not 0 <= self.lr < float("inf"):
            raise UsageError(f"--lr must be finite and not negative, got {self.lr}")
        for key in CLIPPED:
            check_limit(f"--{key.replace('_', '-')}", getattr(self, key), "left out for what the job says")
        if self.precision is not None:
            check_precision("--precision", self.precision)
        if not 0 <= self.watchdog_s < float("inf"):
            raise UsageError(f"--watchdog-s must be finite and not negative, got {self.watchdog_s}")
        if self.heartbeat_s is not None and not 0 < self.heartbeat_s < float("inf"):
            raise UsageError(f"--heartbeat-s must be finite and greater than 0, got {self.heartbeat_s}")
        if self.resume == "auto" and not (self.run_dir or os.environ.get("MPITRAIN_RUN_DIR")):
            raise UsageError(AUTO_WHERE)
        injection.read(self.inject)
        read_steps(self.trace)
        for text in self.target:
            read_option(text)


def apply_overrides(job: Job, overrides: Overrides) -> Job:
    """The job with the command line's options in place; `job.strategy` is set afterwards."""
    from mpitrain.data.datasets.folds import folded, read_fold
    from mpitrain.data.read.shards import Shards
    from mpitrain.model.user_code import Checked, unwrapped

    overrides.check()
    changes: dict[str, Any] = {
        key: value
        for key in (
            "epochs",
            "batch_size",
            "accumulate",
            "precision",
            "seed",
            "checkpoint_every",
            "init",
            "log_every",
            "trace",
            *CLIPPED,
            *VALIDATED,
            "ema",
        )
        if (value := getattr(overrides, key)) is not None
    }
    if overrides.strategy is not None:
        changes["strategy"] = parse(overrides.strategy, "strategy")
    elif job.strategy is None:
        changes["strategy"] = AllReduce()
    if overrides.log:
        changes["log"] = overrides.log
    for key in ("init_partial", "validate_ema"):
        if getattr(overrides, key):
            changes[key] = True
    if overrides.schedule is not None:
        changes |= {"schedule": parse(overrides.schedule, "schedule"), "scheduler": None}
    if overrides.synthetic:
        if job.synthetic is None:
            raise UsageError(
                "--synthetic: the job has no synthetic=mpitrain.Synthetic(...) to draw samples from"
            )
        unset = {key: None for key in VALIDATED if key not in changes}
        changes |= {"data": job.synthetic, "validate": None, "test": None, "target": {}, **unset}
        changes.setdefault("validate_ema", False)
    if overrides.fold is not None:
        part, num_folds = read_fold(overrides.fold)
        changes["data"], changes["validate"] = folded(changes.get("data", job.data), part, num_folds)
    if overrides.test is not None:
        if overrides.synthetic:
            raise UsageError("--test and --synthetic: drawn samples have no part that could be held out")
        changes["test"] = Shards(overrides.test)
    if overrides.target:
        changes["target"] = dict(read_option(text) for text in overrides.target)
    precision = changes.get("precision", job.precision)
    if job.loss is not None:
        changes["loss"] = Checked(unwrapped(job.loss), "loss", precision)
    metrics = unwrapped(job.metrics)
    if inspect.isfunction(metrics):
        changes["metrics"] = Checked(metrics, "metrics", precision)
    return dataclasses.replace(job, **changes)
