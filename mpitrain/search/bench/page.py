"""A benchmark as a page: throughput and efficiency against workers, metrics against time and samples, all figures.

Invariants: a pure function of what `--json` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mpitrain.reporting.pages.figures import Drawing, both_ways, count_text
from mpitrain.reporting.pages.html_page import (
    SWITCH,
    Key,
    Number,
    document,
    figure,
    figures,
    head,
    keys,
    paragraphs,
    table,
    used_columns,
)
from mpitrain.search.bench.text import reasons, sentence, workers_text
from mpitrain.system.sizes import size_text

Rows = Sequence[Mapping[str, Any]]


def bench_page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [row for row in found["rows"] if row.get("samples_per_second")]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    title = f"{found['job']}: {found['scaling']} scaling"
    failures = [
        f"{row['strategy']}, {workers_text(row)}: {why}" for row in found["rows"] for why in reasons(row)
    ]
    note = (
        f"{found['repeats']} runs of each setting, in turns. Batches of virtual workers take {found['compute']}, "
        f"messages {found['network']}."
    )
    body = [
        head(title, "failures" if failures else "finished", "warn" if failures else "good"),
        *paragraphs(map(sentence, found["verdicts"])),
        *paragraphs(failures, "fail"),
        *paragraphs([note], "note"),
        _figures_of(rows),
        "<h2>Scaling</h2>",
        keys(_keys(rows, strategies)),
        figures([
            _against_workers(rows, strategies, "samples_per_second", "samples per second"),
            *([_against_workers(rows, strategies, "efficiency", "efficiency")] if _has_efficiency(rows) else []),
        ]),
        *_learning(rows, strategies, found["metric"]),
    ]  # fmt: skip
    return document(title, body)


def _has_efficiency(rows: Rows) -> bool:
    return any(row["efficiency"] is not None for row in rows)


def _keys(rows: Rows, strategies: Sequence[str]) -> list[Key]:
    """Lines of measured rows are whole, those of virtual ones dashed."""
    return [
        Key(strategy + (" (virtual)" if virtual else ""), number, "dashed" if virtual else "line")
        for number, strategy in enumerate(strategies, 1)
        for virtual in (False, True)
        if any((row["strategy"], row["virtual"]) == (strategy, virtual) for row in rows)
    ]


def _figures_of(rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    titles = [
        "strategy", "workers", "batch", "samples/s", "spread", "speed-up", "efficiency", "bytes of the busiest",
        "energy (J)", "staleness", "target after s", "and samples", "runs that met it",
    ]  # fmt: skip
    lines = []
    for row in rows:
        met = row["to_target"] or {}
        cells = [
            row["strategy"], Number(row["workers"], f"{row['workers']}{' virtual' if row['virtual'] else ''}"),
            row["batch_size"], Number(row["samples_per_second"], count_text(row["samples_per_second"])),
            _share(row["spread"]), _ratio(row["speed_up"]), _share(row["efficiency"]),
            "" if row["num_bytes"] is None else Number(row["num_bytes"], size_text(int(row["num_bytes"]))),
            _blank(row["energy_j"]),
            _blank(row["staleness_mean"]), met.get("seconds", ""), met.get("samples", ""),
            f"{row['num_met']} of {row['num_runs']}",
        ]  # fmt: skip
        lines.append([*cells, *(row["metrics"].get(name, {}).get("mean", "") for name in names)])
    return table(*used_columns([*titles, *names], lines))


def _ratio(value: float | None) -> Any:
    return "" if value is None else Number(value, f"{value:.2f}")


def _share(value: float | None) -> Any:
    return "" if value is None else Number(value, f"{100 * value:.1f} %")


def _blank(value: object) -> Any:
    return "" if value is None else value


def _against_workers(rows: Rows, strategies: Sequence[str], key: str, label: str) -> str:
    drawing = Drawing("workers", counts=True)
    for one in _keys(rows, strategies):
        virtual = one.look == "dashed"
        these = [
            row for row in rows if (row["strategy"], row["virtual"]) == (strategies[one.colour - 1], virtual)
        ]
        points = sorted((row["workers"], row[key]) for row in these if row[key] is not None)
        if points:
            xs, ys = zip(*points, strict=True)
            drawing.line(xs, ys, one.colour, one.look, dots=True, name=one.text)
    drawing.axes.set_ylim(0, None)
    title = f"{label.capitalize()} against workers"
    return figure(drawing.svg(title), title)


def _learning(rows: Rows, strategies: Sequence[str], metric: str | None) -> Iterable[str]:
    """For each number of workers the metric of the first run of each strategy against time and samples."""
    drawn = []
    for number, virtual in dict.fromkeys((row["workers"], row["virtual"]) for row in rows):
        these = [row for row in rows if (row["workers"], row["virtual"]) == (number, virtual)]
        lines = []
        for row in these:
            run = next(one for one in row["runs"] if not one["failure"])
            points = [one for one in run["validations"] if metric in one]
            lines.append((Key(row["strategy"], strategies.index(row["strategy"]) + 1), points))
        if not any(len(points) > 1 for _, points in lines):
            continue
        title, those = f"{metric}, {workers_text(these[0])}", [key for key, points in lines if points]
        seconds = "virtual seconds" if virtual else "seconds since the start"
        drawn.append(
            figure(both_ways(title, partial(_draw, lines, str(metric), seconds)), title, those=those)
        )
    if metric is not None:
        yield "<h2>Learning</h2>"
        yield SWITCH if drawn else ""
        yield figures(drawn)
        if not drawn:
            yield from paragraphs(
                ["Every run was validated once, so there is no curve: give it more epochs."], "note"
            )


def _draw(lines: Sequence[tuple[Key, Rows]], metric: str, seconds: str, x: str) -> Drawing:
    drawing = Drawing("samples" if x == "samples" else seconds)
    for key, points in lines:
        xs = [one["samples" if x == "samples" else "seconds"] for one in points]
        drawing.line(xs, [one[metric] for one in points], key.colour, dots=True, name=key.text)
    return drawing
