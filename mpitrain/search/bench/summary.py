"""Figures of a benchmark's rows from those of their runs, and what follows: which is faster, which model is better.

Invariants: a pure function of the runs. A ratio of two settings is taken between runs of the same turn; a difference
that is smaller than what another seed makes is called none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.reporting.repetitions import is_clear
from mpitrain.reporting.targets import choice_by_name, read_target

Row = dict[str, Any]


def summed_up(row: Row) -> Row:
    """The row with the median of its runs' samples per second, means of the rest, and spreads over its repeats; a row
    without a run that succeeded as it is."""
    runs = [run for run in row.get("runs", ()) if not run["failure"]]
    if not runs:
        return row
    rates = [float(run["samples_per_second"]) for run in runs]
    met = [run["to_target"] for run in runs if run["to_target"]]
    names = dict.fromkeys(name for run in runs for name in run["metrics"] or ())
    metrics = {
        name: _mean_and_deviation([float(run["metrics"][name]) for run in runs if name in run["metrics"]])
        for name in names
    }
    rate = statistics.median(rates)
    return row | {
        "samples_per_second": rate,
        "samples_per_second_per_worker": rate / row["workers"],
        "spread": statistics.stdev(rates) / rate if len(rates) > 1 and rate else None,
        "steps": statistics.fmean(run["steps"] for run in runs),
        "num_bytes": _mean([run["num_bytes"] for run in runs]),
        "energy_j": _mean([run.get("energy_j") for run in runs]),
        "staleness_mean": _mean([run["staleness_mean"] for run in runs]),
        "metrics": metrics,
        "num_met": len(met),
        "num_runs": len(runs),
        "to_target": {
            "seconds": statistics.fmean(one["seconds"] for one in met),
            "samples": statistics.fmean(one["samples"] for one in met),
        }
        if met
        else None,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Each row with its speed-up and its efficiency: its samples per second, and those of each worker, over those of
    one worker under the same strategy, or of the fewest that were measured, as if those had an efficiency of 1. Both
    are None where no other number of workers was measured, so that there is nothing to compare with. A virtual row is
    compared with one device, which its simulation knows."""
    measured: dict[tuple[str, bool], dict[int, Row]] = {}
    for row in rows:
        if row.get("samples_per_second"):
            measured.setdefault((row["strategy"], row["virtual"]), {}).setdefault(int(row["workers"]), row)
    found = []
    for row in rows:
        if row.get("samples_per_second"):
            those = measured[row["strategy"], row["virtual"]]
            ratio = number = None
            if "speed_up" in row:
                ratio, number = row["speed_up"] / row["workers"], 1
            elif len(those) > 1:
                number = min(those)
                ratio = row["samples_per_second_per_worker"] / those[number]["samples_per_second_per_worker"]
            speed_up = None if ratio is None else ratio * row["workers"]
            row = row | {"efficiency": ratio, "speed_up": speed_up, "base_workers": number}
        found.append(row)
    return found


def main_metric(target: Mapping[str, object], rows: Sequence[Row]) -> tuple[str, bool] | None:
    """(the metric that the job is about, whether less of it is better): the first target's, else the first that was
    measured; None where nothing was."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("metrics") or ()))
    for name, goal in target.items():
        if name in names:
            return name, read_target(name, goal).sign in ("<", "<=")
    others = [name for name in names if name != "validation_loss"] or names
    return (others[0], choice_by_name(others[0]).less_is_better) if others else None


def verdicts(rows: Sequence[Row], target: Mapping[str, object]) -> Iterator[Row]:
    """For each number of workers that at least two strategies were measured on: every strategy against the first.

    Yields rows with `faster` (median, least and largest ratio of samples per second), `metric`, `difference` (above 0:
    a better model), `is_clear` (the difference is larger than what seeds make; None of one run each), and
    `to_target_ratio`.
    """
    metric = main_metric(target, rows)
    for key in dict.fromkeys((row["workers"], row["virtual"]) for row in rows):
        these = [
            row for row in rows if (row["workers"], row["virtual"]) == key and row.get("samples_per_second")
        ]
        for row in these[1:]:
            yield _against(these[0], row, metric)


def _against(first: Row, row: Row, metric: tuple[str, bool] | None) -> Row:
    pairs = zip(first["runs"], row["runs"], strict=False)
    ratios = [
        other["samples_per_second"] / one["samples_per_second"]
        for one, other in pairs
        if not one["failure"] and not other["failure"] and one["samples_per_second"]
    ] or [row["samples_per_second"] / first["samples_per_second"]]
    found: Row = {
        "workers": row["workers"],
        "virtual": row["virtual"],
        "strategy": row["strategy"],
        "against": first["strategy"],
        "faster": [statistics.median(ratios), min(ratios), max(ratios)],
        "to_target_ratio": row["to_target"]["seconds"] / first["to_target"]["seconds"]
        if row["to_target"] and first["to_target"] and first["to_target"]["seconds"]
        else None,
    }
    if metric is None or not all(metric[0] in one["metrics"] for one in (first, row)):
        return found
    name, less_is_better = metric
    here, there = row["metrics"][name], first["metrics"][name]
    gain = (there["mean"] - here["mean"]) if less_is_better else (here["mean"] - there["mean"])
    clear = is_clear(gain, [here["deviation"], there["deviation"]])
    return found | {"metric": name, "difference": gain, "is_clear": clear}
