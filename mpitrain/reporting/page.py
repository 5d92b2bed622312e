"""`mpitrain report`: one HTML page of one run, or of several beside one another, that needs no network.

Invariants: every text that comes from a run is escaped. What a run has not left is left out, and a run that is not
finished, or has failed, says so at the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.reporting import figures
from mpitrain.reporting.figures import MOST_BARS
from mpitrain.reporting.html_page import document, figure, table, text
from mpitrain.reporting.rows import Row, metrics_in
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.traced_time import CATEGORIES
from mpitrain.system.files.atomic import check_output, write_whole

MOST_EVENTS = 200
# What a table of a run's figures shows first, in this order; the metrics stand between.
_FIRST = ("status", "job", "strategy", "workers", "servers", "nodes")
_THEN = (
    "samples_per_second", "train_s", "wall_s", "total_wall_s", "node_hours", "energy_joules",
    "steps", "samples", "epochs", "batch_size", "accumulate", "precision",
    "seed", "staleness_mean", "staleness_max", "dropped", "late", "nonfinite", "failure",
)  # fmt: skip


def write_page(run_dirs: Sequence[str | Path], out: str | Path) -> None:
    """Write the page of these runs to `out`.

    Raises:
        UsageError: a directory holds no run, matplotlib is missing, or no file can be made at `out`.
    """
    check_output(out, "--out")
    write_whole(Path(out), page(read_runs([Path(one) for one in run_dirs])))


def page(runs: Sequence[RunFiles]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<h1>{text(title)}</h1>", *_state(runs), _summary(runs), *_curves(runs), *_staleness(runs)]
    body += [*_times(runs), *_traces(runs), *_events(runs), *_differences(runs), *_environments(runs)]
    return document(title, body)


def _state(runs: Sequence[RunFiles]) -> Iterable[str]:
    """What a reader must know before any figure."""
    for run in runs:
        if not run.result:
            yield f'<p class="fail">{text(run.name)} has not come to its end: it is under way, or was ended.</p>'
        elif run.result.get("status") != "ok":
            why = run.result.get("failure") or "no reason was given"
            status = f"status={run.result.get('status')}, exit code {run.result.get('exit_code')}"
            yield f'<p class="fail">{text(f"{run.name}: {status}: {why}")}</p>'
        if run.num_torn:
            lines = f"{run.num_torn} line{'s' * (run.num_torn > 1)}"
            yield f'<p class="note">{text(run.name)}: {lines} of metrics.jsonl could not be read.</p>'
        if any("virtual_s" in row for row in run.rows):
            yield f'<p class="note">{text(run.name)} is a simulation: its seconds are virtual ones.</p>'


def _measured(run: RunFiles) -> dict[str, Any]:
    """Metrics of the run's end, or of its last validation so far."""
    last = run.of_kind("validation")
    return dict(run.result.get("metrics") or (_metrics(last[-1]) if last else {}))


def _metrics(row: Row) -> dict[str, Any]:
    return {name: value for name, value in metrics_in(row).items() if name != "at_s"}


def _summary(runs: Sequence[RunFiles]) -> str:
    rows: list[list[Any]] = []
    metrics = dict.fromkeys(name for run in runs for name in _measured(run))
    for name in [*_FIRST, *metrics, *_THEN]:
        values = [_measured(run).get(name, _fact(run, name)) for run in runs]
        if any(value not in ("", None) for value in values):
            rows.append([name, *values])
    options = dict.fromkeys(name for run in runs for name in run.result.get("options") or {})
    rows += [[name, *((run.result.get("options") or {}).get(name, "") for run in runs)] for name in options]
    return table(["", *(run.name for run in runs)], rows)


def _fact(run: RunFiles, name: str) -> Any:
    if name == "status" and not run.result:
        return "not finished"
    known = run.fact(name)
    return "" if known is None else known


def _curves(runs: Sequence[RunFiles]) -> Iterable[str]:
    found = []
    names = dict.fromkeys(name for run in runs for row in run.of_kind("validation") for name in _metrics(row))

    def progress(run: RunFiles) -> list[Row]:
        return run.of_kind("progress")

    def validations(run: RunFiles) -> list[Row]:
        return run.of_kind("validation")

    if any("loss" in row for run in runs for row in progress(run)):
        found.append(
            figure(figures.curves(runs, progress, "loss", "samples", ("samples", "loss")), "Training loss")
        )
    for name in names:
        for x, label in (("samples", "samples"), ("at_s", "seconds since the start")):
            svg = figures.curves(runs, validations, name, x, (label, name))
            found.append(figure(svg, f"Validation: {name}, by {'samples' if x == 'samples' else 'time'}"))
    if any("samples_per_second" in row for run in runs for row in progress(run)):
        svg = figures.curves(
            runs, progress, "samples_per_second", "at_s", ("seconds since the start", "samples per second")
        )
        found.append(figure(svg, "Throughput"))
    if found:
        yield f'<h2>Curves</h2><div class="figures">{"".join(found)}</div>'


def _staleness(runs: Sequence[RunFiles]) -> Iterable[str]:
    stale = [run for run in runs if run.result.get("staleness_histogram")]
    if stale:
        caption = "Versions between what a gradient was computed from and what it was applied to"
        yield f'<h2>Staleness</h2><div class="figures">{figure(figures.histogram(stale), caption)}</div>'


def _times(runs: Sequence[RunFiles]) -> Iterable[str]:
    found = []
    for run in runs:
        if times := figures.worker_times(run):
            some = f" ({figures.MOST_BARS} of {len(times)} at most)" if len(times) > figures.MOST_BARS else ""
            found.append(figure(figures.shares(run), f"{run.name}: the workers' time{some}"))
    if found:
        yield f'<h2>Where the time went</h2><div class="figures">{"".join(found)}</div>'


def _traces(runs: Sequence[RunFiles]) -> Iterable[str]:
    """The share of each category in the traced steps of each rank."""
    traced = [(run, found) for run in runs if (found := run.traced())]
    if not traced:
        return
    yield "<h2>Traced steps</h2>"
    for run, found in traced:
        if len(runs) > 1:
            yield f"<h3>{text(run.name)}</h3>"
        names = [name for name in CATEGORIES if any(one.seconds[name] for one in found)]
        rows = []
        for one in found[:MOST_BARS]:
            total = sum(one.seconds.values()) or 1.0
            parts = [f"{100 * one.seconds[name] / total:.1f} %" for name in names]
            rows.append([one.label, one.num_steps or "", _seconds(total / max(1, one.num_steps)), *parts])
        yield table(["rank", "steps", "a step, or all", *names], rows)
    yield (
        '<p class="note">Of the main thread of each rank; of a server, of the time that it has recorded. '
        "chrome://tracing and ui.perfetto.dev open the files trace-rank-*.json of the run directory.</p>"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _events(runs: Sequence[RunFiles]) -> Iterable[str]:
    yield "<h2>Faults, restarts and warnings</h2>"
    for run in runs:
        rows = run.unusual()
        shown = [[f"{row['at_s']:.1f} s", row["event"], _details(row)] for row in rows[:MOST_EVENTS]]
        if len(runs) > 1:
            yield f"<h3>{text(run.name)}</h3>"
        yield table((), shown) if shown else '<p class="note">None.</p>'
        if len(rows) > MOST_EVENTS:
            yield f'<p class="note">{len(rows) - MOST_EVENTS} more are in metrics.jsonl.</p>'


def _details(row: Row) -> str:
    left_out = ("event", "time", "t", "at_s", "virtual_s", "schema")
    return ", ".join(f"{key}: {value}" for key, value in row.items() if key not in left_out)


def _flat(value: object, name: str = "") -> dict[str, Any]:
    """A tree of JSON objects as one level, `name.name`."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, one in value.items():
        found |= _flat(one, f"{name}.{key}" if name else str(key))
    return found


def _known(run: RunFiles) -> dict[str, Any]:
    """How the run was asked for, and where it ran."""
    environment = {
        key: value for key, value in run.environment.items() if key not in ("ranks", "command", "schema")
    }
    known = _flat({"option": run.started.get("overrides") or {}, "environment": environment})
    known.pop("environment.variables.MPITRAIN_RUN_DIR", None)  # of every launch another
    return known


def _differences(runs: Sequence[RunFiles]) -> Iterable[str]:
    if len(runs) == 1:
        return
    known = [_known(run) for run in runs]
    names = dict.fromkeys(name for one in known for name in one)
    rows = [
        [name, *(one.get(name, "") for one in known)]
        for name in names
        if any(one.get(name) != known[0].get(name) for one in known)
    ]
    yield "<h2>What was different</h2>"
    yield table(["", *(run.name for run in runs)], rows) if rows else '<p class="note">Nothing.</p>'


def _environments(runs: Sequence[RunFiles]) -> Iterable[str]:
    yield "<h2>Environment</h2>"
    for run in runs:
        command = " ".join(map(str, run.environment.get("command") or ()))
        rows = [["run directory", str(run.folder)], ["command", command], *_known(run).items()]
        body = table((), [row for row in rows if row[1] not in ("", None, {}, [])])
        yield f"<details{' open' if len(runs) == 1 else ''}><summary>{text(run.name)}</summary>{body}</details>"
