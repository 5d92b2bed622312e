"""What a run has left in its directory, read for people who look at it: rows, result, environment.

Invariants: it only reads; every file may be missing, and a row may be torn by a crash or by a run that is going on.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.reporting.rows import METRICS_FILE, SETTINGS, Row, kind_of, metrics_in
from mpitrain.reporting.targets import goals_among
from mpitrain.reporting.traced_time import TracedTime, read_traces
from mpitrain.system.files.folders import check_readable
from mpitrain.system.files.run_directory import RUN_FILE, read_json

_USUAL = {"progress", "validation", "end", "start", "checkpoint", "training", "wall time"}
# What is worth knowing, and neither a fault nor a warning.
_NOTES = {
    "data", "allreduce", "initial weights", "schedule", "codec", "own parameters", "other options", "newest checkpoint",
}  # fmt: skip


@dataclass(frozen=True)
class RunFiles:
    """One run.

    Attributes:
        name: as the page calls it; the directory's, unless two runs share that.
        rows: of metrics.jsonl, each with `at_s`: seconds since the first start, those of earlier starts added up, and
            `trained_s`: the same without what each start took until its first step.
        num_torn: lines that could not be read.
        result, started, environment: of result.json, run.json and env.json, empty where there is none.
    """

    name: str
    folder: Path
    rows: tuple[Row, ...]
    num_torn: int
    result: dict[str, Any]
    started: dict[str, Any]
    environment: dict[str, Any]

    def of_kind(self, kind: str) -> list[Row]:
        """Rows of progress, or of validations (the end of a run that was measured is one)."""
        return [row for row in self.rows if kind_of(row) == kind]

    def validations(self, clock: str, since_first_step: bool = False) -> list[dict[str, Any]]:
        """What each validation measured: the metrics, `samples`, and `at_s`, or `trained_s`, under the name `clock`."""
        return [
            {clock: row["trained_s" if since_first_step else "at_s"], "samples": row.get("samples", 0)}
            | metrics_in(row)
            for row in self.of_kind("validation")
        ]

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end, at its target or not."""
        return self.result.get("exit_code") in (0, 3) or self.result.get("status") in ("ok", "missed")

    @property
    def training_s(self) -> float | None:
        """Seconds of training, virtual ones of a simulated run; None where that is not known."""
        found = self.result.get("train_s") or self.result.get("virtual_s")
        return float(found) if isinstance(found, int | float) else None

    def measured(self) -> dict[str, Any]:
        """Metrics of the run's end, or of its last validation so far."""
        last = self.of_kind("validation")
        return dict(self.result.get("metrics") or (metrics_in(last[-1]) if last else {}))

    def targets(self) -> dict[str, Any]:
        """What it was to reach, by metric."""
        return goals_among([self.result.get("target") or self.started.get("target")])

    def fact(self, name: str) -> Any:
        """Of the result; of a run that has none, of how it was last started. None where nothing is known."""
        starts = [row for row in self.rows if row["event"] == "start"]
        begun = {key: value for key, value in (starts[-1] if starts else {}).items() if key in SETTINGS}
        return self.result.get(name, begun.get(name))

    def notes(self) -> list[Row]:
        """What it has put on record that is neither progress nor unusual."""
        return [row for row in self.rows if row["event"] in _NOTES]

    def unusual(self) -> list[Row]:
        """What happened besides progress: starts after the first, faults, warnings, a failure."""
        starts = [row for row in self.rows if row["event"] == "start"]
        found = [row for row in self.rows if row["event"] not in _USUAL | _NOTES]
        found += [row | {"event": "started again"} for row in starts[1:]]
        ends = [row for row in self.rows if row["event"] == "end" and row.get("failure")]
        ends = [row for row in ends if row.get("status") != "missed"]  # of a target, which is no fault
        found += [
            {"event": "failed", "at_s": row["at_s"], "samples": row.get("samples"), "failure": row["failure"]}
            for row in ends
        ]
        return sorted(found, key=lambda row: float(row["at_s"]))

    def traced(self) -> list[TracedTime]:
        """Where the time of its traced steps went, by rank."""
        return read_traces(self.folder)


def read_runs(folders: list[Path]) -> list[RunFiles]:
    """The runs in these directories, in the order given; a directory of run directories stands for all of them.

    Raises:
        UsageError: a directory is not there, or holds no run.
    """
    folders = [one for folder in folders for one in _runs_in(folder)]
    names = [folder.resolve().name for folder in folders]
    return [
        _read(folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names)
    ]


def _runs_in(folder: Path) -> list[Path]:
    """The directory, or, where it holds no run itself, those in it that do, as a sweep has left them."""
    check_readable(folder)
    if holds_run(folder) or not folder.is_dir():
        return [folder]
    return sorted(one for one in folder.iterdir() if one.is_dir() and holds_run(one)) or [folder]


def holds_run(folder: Path) -> bool:
    """Whether a run has left something there to read."""
    return (folder / METRICS_FILE).exists() or (folder / "result.json").exists()


def _read(folder: Path, name: str) -> RunFiles:
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder} (looked in {Path.cwd()})")
    rows, num_torn = _rows(folder / METRICS_FILE)
    result = read_json(folder / "result.json") or {}
    if not rows and not result:
        raise UsageError(
            f"{folder} holds no run, nor does a directory in it: there is neither metrics.jsonl nor result.json; give "
            "the directory that the run has printed as run_dir"
        )
    started, environment = (read_json(folder / file) or {} for file in (RUN_FILE, "env.json"))
    return RunFiles(name, folder, tuple(rows), num_torn, result, started, environment)


def _rows(path: Path) -> tuple[list[Row], int]:
    try:
        whole = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], 0
    lines = whole.splitlines()
    rows: list[Row] = []
    num_torn, before_s, last_s = 0, 0.0, 0.0
    starts: list[int] = [0]
    for line in lines:
        try:
            row = json.loads(line)
            since_s = float(row.get("virtual_s", row["t"]))
            event = str(row["event"])
        except (ValueError, TypeError, KeyError, AttributeError):
            num_torn += line is not lines[-1] or whole.endswith("\n")  # else it is only being written
            continue
        if event == "start" and rows:
            before_s = last_s
            starts.append(len(rows))
        last_s = before_s + since_s
        rows.append(row | {"event": event, "at_s": last_s})
    trained_s = 0.0
    for first, after in pairwise([*starts, len(rows)]):
        trained_s = _count_training(rows[first:after], trained_s)
    return rows, num_torn


def _count_training(rows: list[Row], before_s: float) -> float:
    """Add `trained_s` to the rows of one start; returns it for the last of them. Without a word of when the first step
    began, the first row of progress counts as the first step."""
    known = [row["at_s"] for row in rows if row["event"] == "training"]
    steps = [row["at_s"] for row in rows if row["event"] in ("progress", "validation")]
    begun_s = (known or steps or [math.inf])[0]
    is_virtual = any("virtual_s" in row for row in rows)
    for row in rows:
        row["trained_s"] = row["at_s"] if is_virtual else before_s + max(0.0, row["at_s"] - begun_s)
    return max((float(row["trained_s"]) for row in rows), default=before_s)
