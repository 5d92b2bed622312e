"""Which runs become members: those that are named, or all runs of the best settings in a directory of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import EXIT_ERROR, EXIT_REQUEUE, UsageError
from mpitrain.job import EMA_PREFIX, Job
from mpitrain.reporting.repetitions import (
    Measured,
    Setting,
    data_of,
    difference_of_data,
    options_of,
    ranked,
    repetition_of,
    setting_of,
    settings_among,
)
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.targets import LOSS, Choice, choice_by_name, read_choice
from mpitrain.training.ensembles.saved import holds_ensemble

DEFAULT_TOP = 3


class Chosen(NamedTuple):
    """Runs, those of the best setting first where a metric has chosen them; those that were passed over, and why."""

    runs: list[RunFiles]
    passed_over: dict[str, str]


def choose_members(folders: Sequence[Path], top: int | None, by: Choice | None, which: str) -> Chosen:
    """The members.

    Args:
        folders: of runs, or directories of runs.
        top: how many settings, each with all of its runs, which differ in seed and fold alone; None: all that are
            named, and of directories of runs the best `DEFAULT_TOP`.
        by: the validation metric by which they are chosen; None: that of the first run's `best`, else its accuracy,
            else the validation loss.
        which: which of a run's models is meant, and so whose metric.

    Raises:
        UsageError: there is no run, fewer than two are left, or one that is named twice or is an ensemble itself; they
            would be compared by what was measured on different data.
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
    chosen = able
    if top is not None or not all_named:
        by = by or default_choice(able[0]) if able else by
        chosen, without = _of_best(able, by, which, top or DEFAULT_TOP) if by else ([], {})
        passed_over |= without
    if len(chosen) < 2:
        left = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
        raise UsageError(
            f"an ensemble has two members or more, and there is {len(chosen)}"
            + (f" ({left})" if left else "")
        )
    return Chosen(chosen, passed_over)


def default_choice(run: RunFiles) -> Choice:
    """What runs like this are compared by where nobody says."""
    best = (run.result.get("best") or {}).get("metric")
    metrics = run.result.get("metrics") or {}
    return choice_by_name(best or ("accuracy" if "accuracy" in metrics else LOSS))


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
    return choice_by_name(target or ("accuracy" if "accuracy" in measured else LOSS))


def _why_unable(run: RunFiles) -> str:
    code = run.result.get("exit_code")
    if not run.result or code == EXIT_REQUEUE:
        return "it is not finished"
    return f"it has failed: {run.result.get('failure')}" if code == EXIT_ERROR else ""


def _of_best(runs: list[RunFiles], by: Choice, which: str, top: int) -> tuple[list[RunFiles], dict[str, str]]:
    """All runs of the best settings, the best setting first, and those without the metric, or in whose setting a run
    is. Where there are no more settings than asked for, nothing is chosen, and so nothing compared."""
    measured = []
    for run in runs:
        options = {name: str(value) for name, value in options_of(run).items()}
        value = _value(run, by, which)
        measured.append(
            Measured(run, frozenset(setting_of(options)), repetition_of(options), value, data_of(run))
        )
    settings = settings_among(measured)
    without = {one.run.name: f"its result has no {by.metric}" for one in measured if one.value is None}
    for setting in settings:
        for run in setting.runs if setting.mean is None else ():
            without.setdefault(run.name, f"another run of its setting has no {by.metric}")
    known = [one for one in settings if one.mean is not None]
    best = ranked(known, by)[:top] if len(known) > top else _in_order(known, by)
    return [run for setting in best for run in setting.runs], without


def _in_order(settings: Sequence[Setting[RunFiles]], by: Choice) -> list[Setting[RunFiles]]:
    """The best first where that can be said; otherwise as they are."""
    return list(settings) if difference_of_data(settings) else ranked(settings, by)


def _value(run: RunFiles, by: Choice, which: str) -> float | None:
    best: dict[str, Any] = run.result.get("best") or {}
    metrics: dict[str, Any] = run.result.get("metrics") or {}
    if which == "best" and best.get("metric") == by.metric:
        found = best.get("value")
    else:
        found = metrics.get(EMA_PREFIX + by.metric if which == "ema" else by.metric)
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if is_number and found is not None else None
