"""Which runs become members: those that are named, or the best ones in a directory of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import EXIT_ERROR, EXIT_REQUEUE, UsageError
from mpitrain.job import EMA_PREFIX, Job
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.targets import LOSS, Choice, read_choice
from mpitrain.training.ensembles.saved import holds_ensemble

DEFAULT_TOP = 3


class Chosen(NamedTuple):
    """Runs, the best first where they were chosen by a metric; those that were passed over, and why."""

    runs: list[RunFiles]
    passed_over: dict[str, str]


def choose_members(folders: Sequence[Path], top: int | None, by: Choice | None, which: str) -> Chosen:
    """The members.

    Args:
        folders: of runs, or directories of runs.
        top: how many; None: all that are named, and of directories of runs the best `DEFAULT_TOP`.
        by: the validation metric by which they are chosen; None: that of the first run's `best`, else its accuracy,
            else the validation loss.
        which: which of a run's models is meant, and so whose metric.

    Raises:
        UsageError: there is no run, fewer than two are left, or one that is named twice or is an ensemble itself.
    """
    for folder in folders:
        if holds_ensemble(folder):
            raise UsageError(f"{folder} is an ensemble: name its members' runs instead")
    runs = read_runs(list(folders))
    places = [run.folder.resolve() for run in runs]
    if twice := next((run.name for run in runs if places.count(run.folder.resolve()) > 1), None):
        raise UsageError(f"run {twice} is named twice; to make it count more, give --weights")
    named = {folder.resolve() for folder in folders}
    all_named = named == set(places)
    passed_over: dict[str, str] = {}
    able = []
    for run in runs:
        why = "" if run.folder.resolve() in named else _why_unable(run)
        if why:
            passed_over[run.name] = why
        else:
            able.append(run)
    if top is None:
        top = len(able) if all_named else DEFAULT_TOP
    if top < len(able):
        by = by or default_choice(able[0])
        able, without = _ranked(able, by, which)
        passed_over |= without
    if min(top, len(able)) < 2:
        left = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
        raise UsageError(
            f"an ensemble has two members or more, and there is {min(top, len(able))}"
            + (f" ({left})" if left else "")
        )
    return Chosen(able[:top], passed_over)


def default_choice(run: RunFiles) -> Choice:
    """What runs like this are compared by where nobody says."""
    best = (run.result.get("best") or {}).get("metric")
    metrics = run.result.get("metrics") or {}
    return read_choice(best or ("accuracy" if "accuracy" in metrics else LOSS))


def choice_of(job: Job, by: str | None, measured: Sequence[str]) -> Choice:
    """The metric by which it is judged whether an ensemble beats its members.

    Raises:
        UsageError: validation measures no such metric.
    """
    if by is not None:
        return read_choice(by, measured)
    if job.best_by is not None and job.best_by.metric in measured:
        return job.best_by
    target = next((name for name in job.target or () if name in measured), None)
    return read_choice(target or ("accuracy" if "accuracy" in measured else LOSS))


def _why_unable(run: RunFiles) -> str:
    code = run.result.get("exit_code")
    if not run.result or code == EXIT_REQUEUE:
        return "it is not finished"
    return f"it has failed: {run.result.get('failure')}" if code == EXIT_ERROR else ""


def _ranked(runs: list[RunFiles], by: Choice, which: str) -> tuple[list[RunFiles], dict[str, str]]:
    """The best first, and those of which the metric is not known."""
    values = {run.name: _value(run, by, which) for run in runs}
    without = {name: f"its result has no {by.metric}" for name, value in values.items() if value is None}
    known = [run for run in runs if run.name not in without]
    sign = 1.0 if by.less_is_better else -1.0
    return sorted(known, key=lambda run: (sign * float(values[run.name] or 0.0), run.name)), without


def _value(run: RunFiles, by: Choice, which: str) -> float | None:
    best: dict[str, Any] = run.result.get("best") or {}
    metrics: dict[str, Any] = run.result.get("metrics") or {}
    if which == "best" and best.get("metric") == by.metric:
        found = best.get("value")
    else:
        found = metrics.get(EMA_PREFIX + by.metric if which == "ema" else by.metric)
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if is_number and found is not None else None
