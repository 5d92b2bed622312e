"""The page of simulated runs beside one another: loss against virtual time, speed-up against workers, timelines.

Invariants: a function of what `mpitrain simulate --json` writes and of the trace files that the runs have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.reporting.pages.figures import MOST_BARS, Drawing, colour, count_text, label_ranks
from mpitrain.reporting.pages.html_page import (
    Key,
    Number,
    document,
    figure,
    figures,
    head,
    paragraphs,
    table,
    used_columns,
)
from mpitrain.reporting.traced_time import CATEGORIES, Span, read_spans
from mpitrain.system.sizes import counted, size_text

MOST_TIMELINES = 12
Rows = Sequence[Mapping[str, Any]]


def comparison_page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"{found['job'] or 'job'}: {len(found['rows'])} simulated runs"
    rows = [row for row in found["rows"] if "samples_per_s" in row]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    note = (
        f"All seconds are virtual: batches take {found['compute']}, messages {found['network']}, and the rest "
        f"{found['costs']}; seed {found['seed']}. One device: {count_text(found['one_device_samples_per_s'])} samples/s"
        + ("." if found["gradients"] else "; no gradients were computed.")
    )
    body = [
        head(title, *_status(found["rows"])),
        *paragraphs(_answers(rows, found["target"])),
        *paragraphs(_failures(found["rows"], missed=False), "fail"),
        *paragraphs(_failures(found["rows"], missed=True), "note"),
        *paragraphs([note], "note"),
        _figures_of(rows, found),
        "<h2>Curves</h2>",
        figures([_speed_up(rows, strategies, found["limits"]), *_losses(rows, strategies)]),
        *_timelines(rows),
    ]
    return document(title, body)


def _answers(rows: Rows, target: object) -> Iterable[str]:
    """For the most workers: which strategy is the fastest, and which meets the target first."""
    if not rows:
        return
    most = max(row["workers"] for row in rows)
    these = sorted((row for row in rows if row["workers"] == most), key=lambda row: -row["samples_per_s"])
    first = these[0]
    rate = count_text(first["samples_per_s"])
    said = f"{first['strategy']}, {rate} samples/s, {first['speed_up']:.2f} times one device"
    if len(these) > 1:
        ratio = first["samples_per_s"] / max(these[1]["samples_per_s"], 1e-9)
        said += f" and {ratio:.2f} times {these[1]['strategy']}, the next"
    yield f"Fastest with {counted(most, 'worker')}: {said}."
    met = sorted((row for row in rows if row.get("to_target")), key=lambda row: row["to_target"]["virtual_s"])
    if target and met:
        first = met[0]
        who = f"{first['strategy']} with {counted(first['workers'], 'worker')}"
        yield f"First at the target: {who}, after {_digits(first['to_target']['virtual_s'])} virtual seconds."


def _status(rows: Rows) -> tuple[str, str]:
    if any(_failures(rows, missed=False)):
        return "failures", "bad"
    return ("targets missed", "warn") if any(_failures(rows, missed=True)) else ("finished", "good")


def _failures(rows: Rows, missed: bool) -> Iterable[str]:
    """Why runs were refused or failed, or else which have missed their target."""
    for row in rows:
        why = row.get("refused") or row.get("failure")
        if why and (row.get("status") == "missed") == missed:
            yield f"{row['strategy']}, {counted(row['workers'], 'worker')}: {why}"


def _figures_of(rows: Rows, found: Mapping[str, object]) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics") or ()))
    titles = [
        "strategy", "workers", "samples/s", "speed-up", "computing", "staleness 50, 90, 99 %", "not applied",
        "virtual s", "bytes of a server", "bytes sent by a rank",
    ]  # fmt: skip
    if found["target"]:
        titles += ["target met after s", "and samples"]
    if restarts := any("restarts" in row for row in rows):
        titles += ["restarts", "s repeated", "s of starting"]
    lines = []
    for row in rows:
        met = row.get("to_target") or {}
        cells = [
            row["strategy"], row["workers"], Number(row["samples_per_s"], count_text(row["samples_per_s"])),
            Number(row["speed_up"], f"{row['speed_up']:.2f}"), _share(row["utilisation"]),
            ", ".join(map(str, row["staleness"].values())),
            _share(row["dropped_share"]), _number(row["virtual_s"]),
            *(Number(row[key], size_text(row[key])) if key in row else "" for key in ("server_bytes", "rank_bytes")),
        ]  # fmt: skip
        if found["target"]:
            cells += [_number(met["virtual_s"]) if met else "", met.get("samples", "")]
        if restarts:
            said = row.get("restarts", {})
            cells += [_number(said.get(key, "")) for key in ("num_restarts", "repeated_s", "starting_s")]
        lines.append([*cells, *(_number((row.get("metrics") or {}).get(name, "")) for name in metrics)])
    return table(*used_columns([*titles, *metrics], lines))


def _digits(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _number(value: Any) -> Any:
    return Number(value, _digits(value)) if isinstance(value, float) else value


def _share(value: float) -> Number:
    return Number(value, f"{100 * value:.1f} %")


def _speed_up(rows: Rows, strategies: Sequence[str], limits: Rows) -> str:
    """Of every strategy, with the ideal, and with what the fitted curve cannot pass."""
    drawing, title = Drawing("workers", counts=True), "Speed-up over one device"
    most = max((row["workers"] for row in rows), default=1)
    drawing.line([1, most], [1, most], 8, "dotted")
    highest = max([float(row["speed_up"]) for row in rows], default=1.0)
    those, has_bound = [], False
    for number, strategy in enumerate(strategies, 1):
        points = [(row["workers"], row["speed_up"]) for row in rows if row["strategy"] == strategy]
        xs, ys = zip(*points, strict=True)
        drawing.line(xs, ys, number, dots=True, name=strategy)
        those.append(Key(strategy, number))
        bound = next((one["speed_up"] for one in limits if one["strategy"] == strategy), None)
        if bound is not None and bound < 3 * highest:
            drawing.level(bound, number, name=f"{strategy} cannot pass")
            has_bound = True
    drawing.axes.set_ylim(0, None)
    note = "Dashed: what the fitted curve cannot pass." if has_bound else ""
    return figure(drawing.svg(title), title, note, [*those, Key("ideal", 8, "dotted")])


def _losses(rows: Rows, strategies: Sequence[str]) -> Iterable[str]:
    """One figure for each number of workers, one line for each strategy; so for each metric of the validations."""
    for number in dict.fromkeys(row["workers"] for row in rows):
        runs = [row for row in rows if row["workers"] == number and row.get("loss_curve")]
        workers = counted(number, "worker")
        yield from _lines(runs, strategies, "loss_curve", "loss", f"Training loss, {workers}")
        for name in dict.fromkeys(name for row in runs for name in row["metrics"]):
            yield from _lines(runs, strategies, "validations", name, f"Validation: {name}, {workers}")


def _lines(rows: Rows, strategies: Sequence[str], key: str, value: str, title: str) -> Iterable[str]:
    """The figure, where a line has two points."""
    drawing, those, most = Drawing("virtual seconds"), [], 0
    for row in rows:
        points = [
            (one["virtual_s"], one[value]) for one in row[key] if isinstance(one.get(value), int | float)
        ]
        number = strategies.index(row["strategy"]) + 1
        if points:
            xs, ys = zip(*points, strict=True)
            drawing.line(xs, ys, number, dots=True, name=row["strategy"])
            those.append(Key(row["strategy"], number))
        most = max(most, len(points))
    if most > 1:
        yield figure(drawing.svg(title), title, those=those)


def _timelines(rows: Rows) -> Iterable[str]:
    """What every rank did in the traced steps."""
    traced = [
        (row, spans) for row in rows if "run_dir" in row and (spans := read_spans(Path(row["run_dir"])))
    ]
    if not traced:
        return
    yield "<h2>Timelines</h2>"
    yield figures([
        _timeline(spans, f"{row['strategy']}, {counted(row['workers'], 'worker')}: the traced steps of each rank")
        for row, spans in traced[:MOST_TIMELINES]
    ])  # fmt: skip
    note = (
        "chrome://tracing and ui.perfetto.dev open the files trace-rank-*.json of the run directories, in which "
        "messages stand, too."
    )
    yield from paragraphs([note], "note")


def _timeline(spans: Mapping[int, Sequence[Span]], title: str) -> str:
    shown = dict(list(spans.items())[:MOST_BARS])
    drawing = Drawing("virtual seconds", height=64 + 18 * len(shown))
    used = [
        name for name in CATEGORIES if any(one.category == name for found in shown.values() for one in found)
    ]
    for place, found in enumerate(shown.values()):
        for order, name in enumerate(CATEGORIES):
            bars = [(one.began_s, one.took_s) for one in found if one.category == name]
            number = CATEGORIES.index(name) + 1
            drawing.axes.broken_barh(
                bars, (place - 0.4, 0.8), color=colour(number), linewidth=0, zorder=2 + order
            )
    label_ranks(drawing, list(shown))
    drawing.tell(f"bars of {', '.join(used)}")
    return figure(
        drawing.svg(title),
        title,
        "By rank.",
        [Key(name, CATEGORIES.index(name) + 1, "area") for name in used],
    )
