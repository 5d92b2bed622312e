"""A benchmark as a page: throughput and efficiency against workers, metrics against time and samples, all figures.

Invariants: a pure function of what `--json` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpitrain.reporting.figures import COLOURS, new_axes, to_svg
from mpitrain.reporting.html_page import document, figure, table, text
from mpitrain.search.bench.text import reasons, sentence
from mpitrain.system.sizes import size_text

Rows = Sequence[Mapping[str, Any]]


def bench_page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [row for row in found["rows"] if row.get("samples_per_second")]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    title = f"{found['job']}: {found['scaling']} scaling"
    note = (
        f"{found['repeats']} runs of each setting, in turns. Batches of virtual workers take {found['compute']}, "
        f"messages {found['network']}."
    )
    body = [
        f"<h1>{text(title)}</h1>",
        f'<p class="note">{text(note)}</p>',
        *(f"<p>{text(sentence(one))}</p>" for one in found["verdicts"]),
        *_failures(found["rows"]),
        _figures_of(rows),
        '<h2>Scaling</h2><div class="figures">',
        _against_workers(rows, strategies, "samples_per_second", "samples per second"),
        _against_workers(rows, strategies, "efficiency", "efficiency"),
        "</div>",
        *_learning(rows, strategies, found["metric"]),
    ]
    return document(title, body)


def _failures(rows: Rows) -> Iterable[str]:
    for row in rows:
        for why in reasons(row):
            yield f'<p class="fail">{text(_name(row))}: {text(why)}</p>'


def _name(row: Mapping[str, object]) -> str:
    return f"{row['strategy']}, {row['workers']} {'virtual ' if row['virtual'] else ''}workers"


def _figures_of(rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    head = [
        "strategy", "workers", "batch", "samples/s", "spread", "speed-up", "efficiency", "bytes of the busiest",
        "energy (J)", "staleness", "target after s", "and samples", "runs that met it",
    ]  # fmt: skip
    lines = []
    for row in rows:
        met = row["to_target"] or {}
        cells = [
            row["strategy"], f"{row['workers']}{' virtual' if row['virtual'] else ''}", row["batch_size"],
            row["samples_per_second"], _share(row["spread"]), _ratio(row["speed_up"]), _share(row["efficiency"]),
            "" if row["num_bytes"] is None else size_text(int(row["num_bytes"])), _blank(row["energy_j"]),
            _blank(row["staleness_mean"]), met.get("seconds", ""), met.get("samples", ""),
            f"{row['num_met']} of {row['num_runs']}",
        ]  # fmt: skip
        lines.append([*cells, *(row["metrics"].get(name, {}).get("mean", "") for name in names)])
    return table([*head, *names], lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _blank(value: object) -> Any:
    return "" if value is None else value


def _against_workers(rows: Rows, strategies: Sequence[str], key: str, label: str) -> str:
    """Lines of measured rows are whole, those of virtual ones dashed."""
    drawing, axes = new_axes(("workers", label))
    for strategy in strategies:
        for virtual, line in ((False, "-"), (True, "--")):
            these = [row for row in rows if row["strategy"] == strategy and row["virtual"] == virtual]
            points = sorted((row["workers"], row[key]) for row in these if row[key] is not None)
            if points:
                axes.plot(
                    *zip(*points, strict=True), line, color=_colour(strategies, strategy), marker="o",
                    markersize=3, label=strategy + (" (virtual)" if virtual else ""),
                )  # fmt: skip
    axes.set_ylim(0, None)
    return figure(to_svg(drawing, axes, legend=True), f"{label.capitalize()} against workers")


def _colour(strategies: Sequence[str], strategy: str) -> str:
    return COLOURS[strategies.index(strategy) % len(COLOURS)]


def _learning(rows: Rows, strategies: Sequence[str], metric: str | None) -> Iterable[str]:
    """For each number of workers the metric of the first run of each strategy against time and samples."""
    if metric is None:
        return
    yield '<h2>Learning</h2><div class="figures">'
    for number, virtual in dict.fromkeys((row["workers"], row["virtual"]) for row in rows):
        these = [row for row in rows if (row["workers"], row["virtual"]) == (number, virtual)]
        for x, label in (("seconds", "virtual seconds" if virtual else "seconds"), ("samples", "samples")):
            drawing, axes = new_axes((label, metric))
            for row in these:
                run = next(one for one in row["runs"] if not one["failure"])
                points = [(one[x], one[metric]) for one in run["validations"] if metric in one]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), color=_colour(strategies, row["strategy"]), marker="o",
                        markersize=2, label=row["strategy"],
                    )  # fmt: skip
            workers = f"{number} {'virtual ' if virtual else ''}worker{'s' * (number > 1)}"
            yield figure(to_svg(drawing, axes, legend=True), f"{metric} by {label}, {workers}")
    yield "</div>"
