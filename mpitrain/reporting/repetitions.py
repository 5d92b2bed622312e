"""Settings: runs that differ in seed and fold alone repeat one setting, and settings are what a choice is made of.

Invariants: it only reads what runs have left. The figure of a setting is the mean over its repetitions: a seed with a
fold counts once, however often it was run. Settings are compared only where they were measured on the same data, and
where each of a setting's repetitions has a finite figure. A spread is the sample standard deviation (n - 1 below).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpitrain.errors import UsageError
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.targets import Choice

OF_ONE_RUN = ("seed", "fold")  # what runs of one setting differ in
_FACTS = ("strategy", "workers", "servers", "batch_size", "accumulate", "precision", "epochs", "seed")
_NOT_OPTIONS = {
    "run_dir", "quiet", "resume", "checkpoint_every", "checkpoint_pause", "log", "log_every", "trace", "watchdog_s",
    "heartbeat_s", "go_back", "compare_every", "test", *_FACTS,
}  # fmt: skip

Run = TypeVar("Run")


@dataclass(frozen=True)
class Measured(Generic[Run]):
    """One run as a choice sees it.

    Attributes:
        setting: options but for seed and fold; repetition: these two, None for a run that repeats nothing.
        value: of the metric, None where there is none; data: what it was measured on, "" where that is not known.
    """

    run: Run
    setting: Hashable
    repetition: Hashable
    value: float | None
    data: str = ""


@dataclass(frozen=True)
class Setting(Generic[Run]):
    """Runs of one setting, in order, with mean and spread over its repetitions. Without a figure for one of these the
    mean is None; with one, `runs` are those that have a figure. The spread of one repetition is None."""

    runs: tuple[Run, ...]
    mean: float | None
    spread: float | None
    num_repetitions: int
    data: frozenset[str]


def options_of(run: RunFiles) -> dict[str, Any]:
    """What a run was started with, by name."""
    given = {
        key: value for key, value in (run.started.get("overrides") or {}).items() if key not in _NOT_OPTIONS
    }
    options = {name: value for name in _FACTS if (value := run.fact(name)) is not None}
    options |= {name: value for name, value in given.items() if value not in (None, False, [], ())}
    if digest := run.started.get("job_sha256"):
        options["job_file"] = str(digest)[:8]  # runs of a job that was changed in between are of two settings
    return options | (run.result.get("options") or run.started.get("options") or {})


def data_of(run: RunFiles) -> str:
    """What its validations were measured on; of runs of earlier versions the fold, where they had one."""
    fold = (run.started.get("overrides") or {}).get("fold")
    return str(run.result.get("measured_on") or (f"fold {fold}" if fold else ""))


def setting_of(options: Mapping[str, object]) -> tuple[tuple[str, Any], ...]:
    """Options without what runs of one setting differ in: seeds and folds."""
    return tuple((name, value) for name, value in options.items() if name not in OF_ONE_RUN)


def repetition_of(options: Mapping[str, object]) -> tuple[Any, ...] | None:
    """Which of the runs of its setting this is: its seed and its fold; None where a run has not said its seed."""
    return tuple(options.get(name, "") for name in OF_ONE_RUN) if options.get("seed", "") != "" else None


def measured(result: Mapping[str, Any], by: Choice) -> float | None:
    """The metric of a run: of its best model where it has kept that by this metric, else of its last one."""
    best = result.get("best") or {}
    value = best.get("value") if best.get("metric") == by.metric and best.get("model") else None
    if value is None:
        value = (result.get("metrics") or {}).get(by.metric)
    try:
        number = float(value) if value is not None else math.nan
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def over_repetitions(values: Iterable[tuple[Hashable, float]]) -> tuple[float | None, float | None, int]:
    """Mean, spread and number of what is finite, of pairs of repetition and value; what was run twice counts once."""
    found: dict[Hashable, list[float]] = {}
    for repetition, value in values:
        if math.isfinite(value):
            found.setdefault(repetition, []).append(value)
    means = [statistics.fmean(those) for those in found.values()]
    spread = statistics.stdev(means) if len(means) > 1 else None
    return (statistics.fmean(means) if means else None), spread, len(means)


def settings_among(runs: Sequence[Measured[Run]]) -> list[Setting[Run]]:
    """The settings, in the order of their first runs."""
    groups: dict[Hashable, list[Measured[Run]]] = {}
    for number, one in enumerate(runs):
        groups.setdefault(one.setting if one.repetition is not None else number, []).append(one)
    found = []
    for those in groups.values():
        known = [one for one in those if one.value is not None]
        mean, spread, number = over_repetitions((one.repetition, one.value or 0.0) for one in known)
        num_repetitions = len({one.repetition for one in those})
        if number < num_repetitions:
            mean = spread = None
        counted = those if mean is None else known
        data = frozenset(one.data for one in counted)
        found.append(Setting(tuple(one.run for one in counted), mean, spread, num_repetitions, data))
    return found


def ranked(settings: Iterable[Setting[Run]], by: Choice) -> list[Setting[Run]]:
    """Those that have a figure, the best first; of equals the first.

    Raises:
        UsageError: they were measured on different data.
    """
    known = [one for one in settings if one.mean is not None and math.isfinite(one.mean)]
    if why := difference_of_data(known):
        raise UsageError(why)
    sign = 1.0 if by.less_is_better else -1.0
    return sorted(known, key=lambda one: sign * float(one.mean or 0.0))


def difference_of_data(settings: Iterable[Setting[Run]]) -> str:
    """Why a comparison of settings that have a figure would say nothing; empty where it does."""
    found: dict[frozenset[str], list[Setting[Run]]] = {}
    for one in settings:
        if one.mean is not None and one.data != {""}:
            found.setdefault(one.data, []).append(one)
    if len(found) < 2:
        return ""
    first, second = (those[0].runs[0] for those in list(found.values())[:2])
    return (
        f"these runs were measured on {len(found)} different sets of validation data (such as {_name(first)} and "
        f"{_name(second)}), so their figures say nothing about which is better: name runs of the same data (of "
        "cross-validation, all folds of each setting)"
    )


def _name(run: Any) -> str:
    return str(getattr(run, "name", run))


def is_clear(difference: float, spreads: Iterable[float | None]) -> bool | None:
    """Whether a difference of two means is larger than what another seed makes: twice the larger of their spreads. None
    where one of these is not known, for it is of one run."""
    known = list(spreads)
    return None if None in known else abs(difference) > 2 * max((one or 0.0 for one in known), default=0.0)


def figure_text(setting: Setting[Run]) -> str:
    """Its mean and spread, for people: "0.9500 +- 0.0100 over 3 runs"."""
    spread = "" if setting.spread is None else f" +- {setting.spread:.2g}"
    number = setting.num_repetitions
    return f"{setting.mean:.6g}{spread}" + (f" over {number} runs" if number > 1 else "")
