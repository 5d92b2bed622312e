"""Runs beside one another: the options in which they differ, what they have measured, how they ended, and, of settings
that were trained several times, mean and spread.

Invariants: it only reads what runs have left, and any of it may be missing. What is called the best is a setting, by
the mean over its seeds and folds (`reporting/repetitions.py`).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError, printable
from mpitrain.options import show
from mpitrain.reporting.pages.html_page import document, head, paragraphs, table
from mpitrain.reporting.repetitions import (
    OF_ONE_RUN,
    Measured,
    Setting,
    data_of,
    difference_of_data,
    figure_text,
    measured,
    options_of,
    ranked,
    repetition_of,
    setting_of,
    settings_among,
)
from mpitrain.reporting.rows import metrics_in
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.targets import Choice, goals_among, main_choice, read_choice
from mpitrain.search.sweep.deal import Standing, standings
from mpitrain.search.sweep.journal import Sweep
from mpitrain.system.saying import csv_cell
from mpitrain.system.sizes import counted, significant

WIDTH = 80
_STATUS = {0: "ok", 3: "missed", 75: "interrupted"}
NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        name: of its directory, as far as that tells it from the others; folder: the directory.
        options: that it was started with, by name; metrics: of its end, or of its last validation so far.
        samples_per_second: its figure of merit, None if it has none; status: "ok", "missed", "failed", ...
        result: as in result.json; data: what it was measured on, "" where that is not known.
    """

    name: str
    folder: Path
    options: Mapping[str, Any]
    metrics: Mapping[str, float]
    samples_per_second: float | None
    status: str
    result: Mapping[str, Any]
    data: str = ""


@dataclass(frozen=True)
class Table:
    """Runs, and what they are compared by (None where nothing was measured)."""

    rows: tuple[RunRow, ...]
    by: Choice | None

    @property
    def options(self) -> list[str]:
        """Names of the options in which the runs differ."""
        names = dict.fromkeys(name for row in self.rows for name in row.options)
        return [name for name in names if len({_text(row.options.get(name, "")) for row in self.rows}) > 1]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics, the one that runs are compared by first."""
        names = dict.fromkeys([self.by.metric] if self.by else [])
        return list(names | dict.fromkeys(name for row in self.rows for name in row.metrics))

    def of_runs(self) -> tuple[list[str], list[list[Any]]]:
        """Head and cells, a line for each run."""
        head = ["run", *self.options, *self.metrics, "samples/s", "status"]
        cells = [
            [
                row.name, *(_text(row.options.get(name, "")) for name in self.options),
                *(row.metrics.get(name, "") for name in self.metrics),
                "" if row.samples_per_second is None else row.samples_per_second, row.status,
            ]
            for row in self.rows
        ]  # fmt: skip
        return head, cells

    def measured(self, metric: str) -> list[Measured[RunRow]]:
        """The runs, each with its setting and what it has reached."""
        by = self.by if self.by and self.by.metric == metric else None
        found, names = [], self.options
        for row in self.rows:
            options = {name: _text(row.options.get(name, "")) for name in names}
            value = _value(row, by) if by else row.metrics.get(metric)
            found.append(Measured(row, setting_of(options), repetition_of(row.options), value, row.data))
        return found

    def of_settings(self) -> tuple[list[str], list[list[Any]]] | None:
        """Head and cells of mean and spread of each metric, a line for each setting; None where none was repeated."""
        by_metric = {name: settings_among(self.measured(name)) for name in self.metrics}
        found = settings_among(self.measured(""))
        if all(one.num_repetitions == 1 for one in found):
            return None
        names = [name for name in self.options if name not in OF_ONE_RUN]
        head = [*names, "runs", *(f"{name} {what}" for name in self.metrics for what in ("mean", "spread"))]
        lines = []
        for at, setting in enumerate(found):
            options = setting.runs[0].options
            cells: list[Any] = [_text(options.get(name, "")) for name in names] + [setting.num_repetitions]
            for those in by_metric.values():
                cells += ["" if one is None else one for one in (those[at].mean, those[at].spread)]
            lines.append(cells)
        return head, lines

    def best(self) -> Setting[RunRow]:
        """The setting whose mean over its runs is the best.

        Raises:
            UsageError: nothing was measured, or not on the same data.
        """
        if self.by is None:
            raise UsageError("none of these runs has measured anything: their job has no validate=")
        found = ranked(settings_among(self.measured(self.by.metric)), self.by)
        if not found:
            raise UsageError(
                f"none of these runs has come to its end with a finite {self.by.metric} (of a setting that was trained "
                "several times, all of its runs)"
            )
        return found[0]

    def about(self, best: Setting[RunRow]) -> list[str]:
        """What people should know of the best setting."""
        assert self.by is not None
        names = [name for name in self.options if name not in OF_ONE_RUN]
        options = " ".join(f"{name}={_text(best.runs[0].options.get(name, ''))}" for name in names)
        number = len(settings_among(self.measured(self.by.metric)))
        return [
            f"best of {counted(number, 'setting')}: {self.by.metric} {figure_text(best)}"
            + (f"; {options}" if options else "")
        ]

    @property
    def note(self) -> str:
        """What people should know before they compare these runs; empty where nothing."""
        return difference_of_data(settings_among(self.measured(self.by.metric))) if self.by else ""


def _value(row: RunRow, by: Choice) -> float | None:
    if row.status in ("failed", NOT_FINISHED, "running", "open"):
        return None
    return measured(row.result, by) if row.result else row.metrics.get(by.metric)


def read_table(folders: Sequence[str | Path], metric: str | None = None) -> Table:
    """The runs in these directories: each a run, a sweep, or a directory of runs.

    Raises:
        UsageError: a directory holds no run, or no run reports the metric.
    """
    rows: list[RunRow] = []
    by: Choice | None = None
    for folder in map(Path, folders):
        plan = Sweep(folder).plan()
        if plan is not None:
            rows += _of_sweep(folder)
            by = by or (read_choice(plan.metric) if plan.metric else None)
        else:
            rows += [_row(run) for run in read_runs([folder])]
    rows = _named_apart(rows)
    rows.sort(key=lambda row: ([str(row.folder.parent)], _natural(row.name)))
    reported = sorted({name for row in rows for name in row.metrics})
    if metric:
        by = read_choice(metric, reported or None, "--metric")
    if by is None and reported:
        by = main_choice(goals_among(row.result.get("target") for row in rows), reported)
    return Table(tuple(rows), by)


def _named_apart(rows: Sequence[RunRow]) -> list[RunRow]:
    """Each run once, called by as many of the folders above it as it takes to tell it from the others."""
    by_place = {row.folder.resolve(): row for row in reversed(rows)}
    places = [place for row in rows if (place := row.folder.resolve()) and by_place.get(place) is row]
    for depth in range(1, max((len(place.parts) for place in places), default=0) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return [
        dataclasses.replace(by_place[place], name=name) for place, name in zip(places, names, strict=True)
    ]


def _of_sweep(folder: Path) -> list[RunRow]:
    """The runs of a sweep, those that have not begun too; the journal says how each stands."""
    sweep = Sweep(folder)
    plan = sweep.plan()
    assert plan is not None
    records = sweep.records()
    found = []
    configurations = plan.configurations() or [
        plan.repeated(index, setting)
        for first, setting in sorted(sweep.proposals().items())
        for index in range(first, first + plan.num_repeats)
    ]
    stands = standings(records, plan.num_configurations, plan.num_rungs)
    for one in configurations:
        stand, run_dir = stands[one.number], sweep.run_dir(one.number)
        options = dict(one.options)
        if run_dir.is_dir() and ((run_dir / "result.json").exists() or (run_dir / "metrics.jsonl").exists()):
            row = _row(read_runs([run_dir])[0])
            found.append(
                RunRow(
                    row.name, run_dir, {**row.options, **options}, row.metrics, row.samples_per_second,
                    _standing_text(stand, row), row.result, row.data,
                )
            )  # fmt: skip
        else:
            found.append(RunRow(str(one.number), run_dir, options, {}, None, stand.status, {}))
    return found


def _standing_text(stand: Standing, row: RunRow) -> str:
    """As the journal has it; of a run that has come to its end, as that says."""
    return row.status if stand.status in ("ok", "missed") else stand.status


def _row(run: RunFiles) -> RunRow:
    code = run.result.get("exit_code")
    status = NOT_FINISHED if not run.result else _STATUS.get(code if isinstance(code, int) else 1, "failed")
    last = run.of_kind("validation")
    found = run.result.get("metrics") or (metrics_in(last[-1]) if last else {})
    metrics = {name: number for name, value in found.items() if (number := _number(value)) is not None}
    rate = run.result.get("samples_per_second")
    return RunRow(
        run.folder.resolve().name, run.folder, options_of(run), metrics,
        float(rate) if isinstance(rate, int | float) else None, status, run.result, data_of(run),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _natural(name: str) -> list[Any]:
    """So that 10 comes after 2."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def _text(value: object) -> str:
    return show(value) if not isinstance(value, float) else f"{value:.6g}"


# ---- forms


def as_text(found: Table) -> str:
    """For a terminal of 80 columns; a wider table in blocks, each with the names of the runs."""
    parts = [_blocks(*found.of_runs(), num_first=1)]
    if repeated := found.of_settings():
        parts += [
            "",
            f"over seeds{' and folds' * ('fold' in found.options)}:",
            _blocks(*repeated, num_first=0),
        ]
    if found.note:
        parts += ["", f"note: {found.note}"]
    return "\n".join(parts)


def _blocks(head: Sequence[str], cells: Sequence[Sequence[object]], num_first: int) -> str:
    lines = [list(map(_cell, head)), *([_cell(cell) for cell in row] for row in cells)]
    widths = [min(WIDTH - 2, max(len(line[column]) for line in lines)) for column in range(len(head))]
    first = list(range(num_first))
    blocks: list[list[int]] = [list(first)]
    for column in range(num_first, len(head)):
        used = sum(widths[one] + 2 for one in blocks[-1])
        if used + widths[column] > WIDTH and len(blocks[-1]) > num_first:
            blocks.append(list(first))
        blocks[-1].append(column)
    texts = []
    for columns in blocks:
        texts.append(
            "\n".join("  ".join(line[one].ljust(widths[one]) for one in columns).rstrip() for line in lines)
        )
    return "\n\n".join(texts)


def _cell(value: object) -> str:
    return printable(significant(value, 5) if isinstance(value, float) else str(value))


def as_csv(found: Table) -> str:
    """A line for each run, with all digits, and the directory last."""
    head, cells = found.of_runs()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    lines = [
        [*head, "run_dir"],
        *([*row, str(run.folder)] for row, run in zip(cells, found.rows, strict=True)),
    ]
    writer.writerows(map(csv_cell, line) for line in lines)
    return out.getvalue()


def as_html(found: Table) -> str:
    """A page that needs no network."""
    return document("runs", _body(found))


def _body(found: Table) -> Iterable[str]:
    title = f"{len(found.rows)} runs"
    best: tuple[int, ...] = ()
    num_ended = sum(row.status in ("ok", "missed") for row in found.rows)
    status = "all finished" if num_ended == len(found.rows) else f"{num_ended} finished"
    yield head(title, status, "good" if num_ended == len(found.rows) else "warn")
    if found.by is not None:
        try:
            setting = found.best()
            best = tuple(
                number for number, row in enumerate(found.rows) if any(row is one for one in setting.runs)
            )
            yield from paragraphs(f"{line[:1].upper()}{line[1:]}." for line in found.about(setting))
            folders = ", ".join(str(row.folder) for row in setting.runs)
            yield from paragraphs([f"Its runs, marked in the table: {folders}"])
        except UsageError as error:
            yield from paragraphs([str(error)], "fail")
        better = "less" if found.by.less_is_better else "more"
        yield from paragraphs([f"Compared by {found.by.metric}: {better} is better."], "note")
    titles, cells = found.of_runs()
    yield table(titles, cells, best)
    if repeated := found.of_settings():
        yield "<h2>Over seeds and folds</h2>"
        yield table(*repeated)
        yield from paragraphs(["The spread is the sample standard deviation."], "note")
    yield from paragraphs([found.note] if found.note else [], "note")
