"""`mpitrain report`: one HTML page of one run, or of several beside one another, that needs no network.

Invariants: every text that comes from a run is escaped. What a run has not left is left out, and a run that is not
finished, or has failed, says so at the top. What somebody asks first stands first: how it stands, four numbers,
sentences; then curves; then everything else, folded where it is long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.reporting.pages import times
from mpitrain.reporting.pages.answers import Answer, answer, differing, met_target, names_of, seconds_text
from mpitrain.reporting.pages.curves import Shown, curves, shown
from mpitrain.reporting.pages.figures import compact, count_text
from mpitrain.reporting.pages.html_page import (
    Number,
    document,
    folded,
    head,
    paragraphs,
    table,
    text,
    tiles,
)
from mpitrain.reporting.pages.one_run import about, numbers_of, sentences_of, status_of
from mpitrain.reporting.rows import Row
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.reporting.targets import LOSS
from mpitrain.system.files.atomic import check_output, write_whole
from mpitrain.system.sizes import counted

MOST_EVENTS = 200
# What a table of a run's figures shows first, in this order; the metrics stand between.
_FIRST = ("status", "job", "strategy", "workers", "servers", "nodes")
_THEN = (
    "samples_per_second", "train_s", "virtual_s", "wall_s", "total_wall_s", "node_hours", "energy_joules",
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
    return document(title, body_of(runs))


def body_of(runs: Sequence[RunFiles], live: Sequence[str] = ()) -> Iterable[str]:
    """What stands in it; `live`: of one run that is under way, in place of its head and of the first sentence."""
    found = answer(runs)
    ranked = [run for setting in found.order for run in setting.runs]
    of = shown(runs, names_of(runs), ranked, found.by)
    if len(runs) == 1:
        yield from live or _head_of_one(runs[0], found)
        yield from _warnings(runs, of)
        yield from paragraphs(sentences_of(runs[0], found.by, not live))
    else:
        yield from _head_of_several(runs, of, found)
        yield from _warnings(runs, of)
        yield _comparison(of, found)
    yield from curves(of)
    yield from times.sections(of)
    yield from _events(of)
    yield from _differences(of)
    yield "<h2>Everything else</h2>"
    yield folded("All figures", _figures(of))
    yield from _environments(of)


def _head_of_one(run: RunFiles, found: Answer) -> Iterable[str]:
    yield head(run.name, *status_of(run), about(run))
    yield tiles(numbers_of(run, found.by))


def _head_of_several(runs: Sequence[RunFiles], of: Shown, found: Answer) -> Iterable[str]:
    num_ended, jobs = (
        sum(run.is_finished for run in runs),
        dict.fromkeys(str(run.fact("job") or "") for run in runs),
    )
    status = f"all {len(runs)} finished" if num_ended == len(runs) else f"{num_ended} of {len(runs)} finished"
    yield head(
        f"{len(runs)} runs", status, "good" if num_ended == len(runs) else "warn", list(filter(None, jobs))
    )
    yield from paragraphs(found.sentences[:1], "lead")
    yield from paragraphs(found.sentences[1:])
    numbers = []
    if found.by and found.order:
        best = compact(float(found.order[0].mean or 0.0))
        numbers.append((f"best {found.by.metric}", best, found.best_name))
        if found.margin is not None:
            said = {
                True: "more than seeds make",
                False: "no more than seeds may make",
                None: "of one run each",
            }
            numbers.append(("better than the next by", compact(found.margin), said[found.is_clear]))
    rates = {name: rate for run, name, _ in of.each() if (rate := run.result.get("samples_per_second"))}
    if rates:
        fastest = max(rates, key=lambda name: rates[name])
        numbers.append(("most samples/s", count_text(rates[fastest]), fastest))
    met = sum(met_target(run) is not None for run in runs)
    has_target = any(run.targets() for run in runs)
    numbers.append(
        ("met the target", f"{met} of {len(runs)}", "")
        if has_target
        else ("finished", f"{num_ended} of {len(runs)}", "")
    )
    yield tiles(numbers)


def _warnings(runs: Sequence[RunFiles], of: Shown) -> Iterable[str]:
    """What a reader must know before any figure."""
    for run, name in zip(of.runs, of.names, strict=True):
        if not run.result and len(runs) > 1:
            yield from paragraphs([f"{name} has not come to its end: it is under way, or was ended."], "fail")
        elif run.result and run.result.get("status") not in ("ok", "missed") and len(runs) > 1:
            yield from paragraphs(
                [f"{name}: {status_of(run)[0]}: {run.result.get('failure') or 'no reason was given'}"], "fail"
            )
        if run.num_torn:
            yield from paragraphs(
                [f"{name}: {counted(run.num_torn, 'line')} of metrics.jsonl could not be read."], "note"
            )
        if any("virtual_s" in row for row in run.rows):
            yield from paragraphs([f"{name} is a simulation: its seconds are virtual ones."], "note")


def _comparison(of: Shown, found: Answer) -> str:
    """A line for each run: what it was given that others were not, and what came of it."""
    options = differing(of.runs)
    metrics = [found.by.metric] if found.by else []
    if LOSS not in metrics and any(LOSS in run.measured() for run in of.runs):
        metrics.append(LOSS)
    has_target = any(run.targets() for run in of.runs)
    titles = [
        "run",
        *options,
        *metrics,
        "samples/s",
        "training time",
        *(["target met after"] if has_target else []),
        "status",
    ]
    lines: list[list[Any]] = []
    for at, run in enumerate(of.runs):
        met, rate = met_target(run), run.result.get("samples_per_second")
        lines.append([
            run.name, *(_as_number(texts[at]) for texts in options.values()),
            *(run.measured().get(name, "") for name in metrics),
            "" if rate is None else Number(float(rate), count_text(float(rate))), _time(run.training_s),
            *([_time(met["trained_s"] if met else None)] if has_target else []), status_of(run)[0],
        ])  # fmt: skip
    best = [number for number, run in enumerate(of.runs) if any(run is one for one in found.best)]
    note = '<p class="note">The best is marked. A click on a title sorts.</p>' if best else ""
    return table(titles, lines, best) + note


def _as_number(given: str) -> Any:
    try:
        return Number(float(given), given)
    except ValueError:
        return given


def _time(seconds: Any) -> Any:
    return Number(float(seconds), seconds_text(float(seconds))) if isinstance(seconds, int | float) else ""


def _figures(of: Shown) -> str:
    rows: list[list[Any]] = []
    metrics = dict.fromkeys(name for run in of.runs for name in run.measured())
    for name in [*_FIRST, *metrics, *_THEN]:
        values = [run.measured().get(name, _fact(run, name)) for run in of.runs]
        if any(value not in ("", None) for value in values):
            rows.append([name, *values])
    options = dict.fromkeys(name for run in of.runs for name in run.result.get("options") or {})
    rows += [
        [name, *((run.result.get("options") or {}).get(name, "") for run in of.runs)] for name in options
    ]
    return table(["", *of.names], rows)


def _fact(run: RunFiles, name: str) -> Any:
    if name == "status" and not run.result:
        return "not finished"
    known = run.fact(name)
    return "" if known is None else known


def _events(of: Shown) -> Iterable[str]:
    yield "<h2>Faults, restarts and warnings</h2>"
    calm = [name for run, name in zip(of.runs, of.names, strict=True) if not run.unusual()]
    if calm:
        yield from paragraphs(["None." if len(calm) == len(of.runs) else f"None: {', '.join(calm)}."], "note")
    for run, name in zip(of.runs, of.names, strict=True):
        if rows := run.unusual():
            if len(of.runs) > 1:
                yield f"<h3>{text(name)}</h3>"
            yield _table_of_events(rows)
    notes = [(name, rows) for run, name in zip(of.runs, of.names, strict=True) if (rows := run.notes())]
    if notes:
        yield folded(
            "Notes", _one_after_another(of, [(name, _table_of_events(rows)) for name, rows in notes])
        )


def _one_after_another(of: Shown, parts: Sequence[tuple[str, str]]) -> str:
    """What there is of each run; of several with their names above."""
    return "".join(("" if of.is_one else f"<h3>{text(name)}</h3>") + part for name, part in parts)


def _table_of_events(rows: Sequence[Row]) -> str:
    lines = [[f"{row['at_s']:.1f} s", row["event"], _details(row)] for row in rows[:MOST_EVENTS]]
    more = [f"{len(rows) - MOST_EVENTS} more are in metrics.jsonl."] if len(rows) > MOST_EVENTS else []
    return table((), lines) + "".join(paragraphs(more, "note"))


def _details(row: Row) -> str:
    left_out = ("event", "time", "t", "at_s", "trained_s", "virtual_s", "schema")
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


def _differences(of: Shown) -> Iterable[str]:
    if of.is_one:
        return
    known, told = [_known(run) for run in of.runs], {f"option.{name}" for name in differing(of.runs)}
    names = dict.fromkeys(name for one in known for name in one if name not in told)
    rows = [
        [name, *(one.get(name, "") for one in known)]
        for name in names
        if any(one.get(name) != known[0].get(name) for one in known)
    ]
    yield "<h2>What else was different</h2>"
    yield table(["", *of.names], rows) if rows else '<p class="note">Nothing.</p>'


def _environments(of: Shown) -> Iterable[str]:
    parts = []
    for run, name in zip(of.runs, of.names, strict=True):
        command = " ".join(map(str, run.environment.get("command") or ()))
        rows = [["run directory", str(run.folder)], ["command", command], *_known(run).items()]
        parts.append((name, table((), [row for row in rows if row[1] not in ("", None, {}, [])])))
    yield folded("Environment", _one_after_another(of, parts))
