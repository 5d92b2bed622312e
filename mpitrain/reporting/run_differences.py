"""Two runs beside one another: whether they can be compared, how far apart their figures are, and what else differs.

Invariants: it only reads. A figure that is no number is never within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import EXIT_ERROR, EXIT_REQUEUE, UsageError
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.targets import choice_by_name
from mpitrain.system.files.run_directory import read_json
from mpitrain.values import nearest

RATE = "samples_per_second"
SETTINGS = (
    "job",
    "strategy",
    "workers",
    "servers",
    "batch_size",
    "accumulate",
    "precision",
    "device",
    "epochs",
)
# Of what a run was started with: where things are, how much is said, and what SETTINGS hold.
_NO_OPTIONS = {*SETTINGS, "run_dir", "quiet", "log", "log_every", "resume", "trace"}
# Of env.json: what is another for each start.
_NO_ENVIRONMENT = {"command", "directory", "time", "ranks", "launch"}


class Tolerance(NamedTuple):
    """How far a figure may be from the first run's: `amount`, of that one's size if `is_share`."""

    amount: float
    is_share: bool

    def __str__(self) -> str:
        return f"{100 * self.amount:g}%" if self.is_share else f"{self.amount:g}"

    def admits(self, before: float, after: float) -> bool:
        """Whether `after` is as near as that."""
        if not (math.isfinite(before) and math.isfinite(after)):
            return False
        least = 1e-12 * max(abs(before), abs(after))  # 5% of 100 holds 105
        return abs(after - before) <= self.amount * (abs(before) if self.is_share else 1) + least


class Compared(NamedTuple):
    """One figure of both runs. `is_worse`: that of the second is worse than that of the first."""

    name: str
    before: float
    after: float
    tolerance: Tolerance
    is_within: bool
    is_worse: bool


class Comparison(NamedTuple):
    """What there is to say of two runs; `differing`: values of what else differs, by name."""

    names: tuple[str, str]
    figures: list[Compared]
    differing: dict[str, tuple[Any, Any]]

    @property
    def is_within(self) -> bool:
        """Whether all figures are within their tolerances."""
        return all(one.is_within for one in self.figures)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        figures = [one._asdict() | {"tolerance": str(one.tolerance)} for one in self.figures]
        return {
            "schema": 1, "runs": self.names, "is_within": self.is_within, "figures": figures,
            "differing": self.differing,
        }  # fmt: skip


def read_tolerances(texts: Sequence[str]) -> dict[str, Tolerance]:
    """Tolerances by figure, "" for the others: of texts such as "5%", "accuracy=0.5%" and "validation_loss=0.01".

    Raises:
        UsageError: one is not of that form.
    """
    found = {"": Tolerance(0.05, True)}
    for text in texts:
        name, _, amount = text.rpartition("=")
        is_share = amount.strip().endswith("%")
        try:
            number = float(amount.strip().removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            raise UsageError(
                f'--tolerance {text!r}: write "5%" (of the first run\'s figure), "0.01" (absolute), or either with the '
                'name of a figure, "accuracy=0.5%"'
            )
        found[name.strip()] = Tolerance(number, is_share)
    return found


def compare(
    first: Path,
    second: Path,
    tolerances: Mapping[str, Tolerance],
    across: Sequence[str] = (),
    worse_only: bool = False,
) -> Comparison:
    """Compare two runs.

    Args:
        first, second: run directories, or their `result.json` alone; the first is what the second is measured by.
        tolerances: as `read_tolerances` returns them.
        across: names of settings that may differ.
        worse_only: whether a change for the better is within any tolerance.

    Raises:
        UsageError: they cannot be compared: one is missing, broken, unfinished or has failed, a setting differs, or
            they have measured different metrics; the message says what, and how to compare all the same.
    """
    runs = (_read(first), _read(second))
    names = (runs[0].name, runs[1].name) if runs[0].name != runs[1].name else (str(first), str(second))
    settings = [_settings(run) for run in runs]
    known = sorted({*settings[0], *settings[1]})
    for name in across:
        if name not in known:
            raise UsageError(f"--across {name!r}: these runs have no such setting{nearest(name, known)}")
    differing = _differing(*settings)
    if refused := {name: pair for name, pair in differing.items() if name not in across}:
        text = "; ".join(f"{name}: {_shown(pair[0])} and {_shown(pair[1])}" for name, pair in refused.items())
        raise UsageError(
            f"{names[0]} and {names[1]} are not comparable: {text}; --across {','.join(refused)} compares them all the "
            "same"
        )
    figures = _figures(runs, names, tolerances, worse_only)
    differing |= _differing(*map(_surroundings, runs))
    return Comparison(names, figures, differing)


def _read(path: Path) -> RunFiles:
    if path.is_dir():
        run, *others = read_runs([path])
        if others:
            raise UsageError(f"{path} holds {1 + len(others)} runs; name one of them, such as {run.folder}")
    else:
        result = read_json(path)
        if result is None:
            what = "is no JSON object" if path.exists() else f"is not there (looked in {Path.cwd()})"
            raise UsageError(f"{path} {what}; give a run directory, or the result.json of one")
        run = RunFiles(str(path), path.parent, (), 0, result, {}, {})
    code = run.result.get("exit_code")
    if not run.result or code == EXIT_REQUEUE or run.result.get("status") == "requeue":
        raise UsageError(f"{path} is not comparable: the run is not finished, or its result.json is broken")
    if code == EXIT_ERROR or (code is None and run.result.get("failure")):
        raise UsageError(f"{path} is not comparable: the run has failed: {run.result.get('failure')}")
    if not isinstance(run.result.get("metrics"), Mapping) or RATE not in run.result:
        raise UsageError(
            f"{path} is not comparable: its result has no metrics and {RATE}, as that of a run has"
        )
    return run


def _settings(run: RunFiles) -> dict[str, Any]:
    """What must be equal: that of older results is not all known."""
    found = {name: run.fact(name) for name in SETTINGS}
    found["strategy"] = run.result.get("strategy_asked") or found["strategy"]
    found |= {"virtual": bool(run.result.get("virtual")), "synthetic": bool(run.result.get("synthetic"))}
    found |= run.result.get("options") or {}
    return {name: value for name, value in found.items() if value is not None}


def _surroundings(run: RunFiles) -> dict[str, Any]:
    """What is worth knowing where figures differ."""
    options = {
        name: value for name, value in (run.started.get("overrides") or {}).items() if name not in _NO_OPTIONS
    }
    environment = {name: value for name, value in run.environment.items() if name not in _NO_ENVIRONMENT}
    found = {"seed": run.result.get("seed"), "SHA-256 of the job file": run.started.get("job_sha256")}
    return {name: value for name, value in found.items() if value is not None} | options | _flat(environment)


def _flat(tree: Mapping[str, object], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[above + name] = value
    return found


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Of what is known of both."""
    return {
        name: (value, other[name]) for name, value in one.items() if name in other and other[name] != value
    }


def _figures(
    runs: tuple[RunFiles, RunFiles],
    names: tuple[str, str],
    tolerances: Mapping[str, Tolerance],
    worse_only: bool,
) -> list[Compared]:
    measured = [{RATE: run.result[RATE], **run.result["metrics"]} for run in runs]
    if lacking := [
        name for name in {**measured[0], **measured[1]} if not all(name in one for one in measured)
    ]:
        raise UsageError(
            f"{names[0]} and {names[1]} are not comparable: only one of them has measured {', '.join(lacking)}"
        )
    for name in tolerances:
        if name and name not in measured[0]:
            raise UsageError(f"--tolerance {name}=...: no such figure{nearest(name, list(measured[0]))}")
    found = []
    for name in measured[0]:
        before, after = (_number(one[name]) for one in measured)
        tolerance = tolerances.get(name, tolerances[""])
        is_worse = before != after and not choice_by_name(name).is_better(after, before)
        is_within = tolerance.admits(before, after) or (worse_only and not is_worse and math.isfinite(before))
        found.append(Compared(name, before, after, tolerance, is_within, is_worse))
    return found


def _number(value: Any) -> float:
    """Of a result, which holds numbers that are not finite as texts."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _shown(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else repr(value)
