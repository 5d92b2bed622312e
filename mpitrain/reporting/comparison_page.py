"""The page of simulated runs beside one another: loss against virtual time, speed-up against workers, timelines.

Invariants: a function of what `mpitrain simulate --json` writes and of the trace files that the runs have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.reporting.figures import COLOURS, MOST_BARS, colours, new_axes, to_svg
from mpitrain.reporting.html_page import document, figure, table, text
from mpitrain.reporting.traced_time import CATEGORIES, Span, read_spans
from mpitrain.system.sizes import size_text

MOST_TIMELINES = 12
Rows = Sequence[Mapping[str, Any]]


def comparison_page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"{found['job'] or 'job'}: {len(found['rows'])} simulated runs"
    rows = [row for row in found["rows"] if "samples_per_s" in row]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    body = [
        f"<h1>{text(title)}</h1>",
        f'<p class="note">All seconds are virtual: batches take {text(found["compute"])}, messages '
        f"{text(found['network'])}, and the rest {text(found['costs'])}; seed {text(found['seed'])}. One device: "
        f"{text(found['one_device_samples_per_s'])} samples/s"
        + ("." if found["gradients"] else "; no gradients were computed.")
        + "</p>",
        *_failures(found["rows"]),
        _figures_of(rows, found),
        "<h2>Curves</h2>",
        '<div class="figures">',
        _speed_up(rows, strategies, found["limits"]),
        *_losses(rows, strategies),
        "</div>",
        *_timelines(rows),
    ]
    return document(title, body)


def _failures(rows: Rows) -> Iterable[str]:
    for row in rows:
        if why := row.get("refused") or row.get("failure"):
            said = f"{row['strategy']}, {row['workers']} workers: {why}"
            yield f'<p class="fail">{text(said)}</p>'


def _figures_of(rows: Rows, found: Mapping[str, object]) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics") or ()))
    head = [
        "strategy", "workers", "samples/s", "speed-up", "computing", "staleness 50, 90, 99 %", "not applied",
        "virtual s", "bytes of a server", "bytes sent by a rank",
    ]  # fmt: skip
    if found["target"]:
        head += ["target met after s", "and samples"]
    if restarts := any("restarts" in row for row in rows):
        head += ["restarts", "s repeated", "s of starting"]
    lines = []
    for row in rows:
        met = row.get("to_target") or {}
        cells = [
            row["strategy"], row["workers"], _digits(row["samples_per_s"]), f"{row['speed_up']:.2f}",
            f"{100 * row['utilisation']:.1f} %", ", ".join(map(str, row["staleness"].values())),
            f"{100 * row['dropped_share']:.1f} %", _digits(row["virtual_s"]),
            *(size_text(row[key]) if key in row else "" for key in ("server_bytes", "rank_bytes")),
        ]  # fmt: skip
        if found["target"]:
            cells += [_digits(met["virtual_s"]) if met else "", met.get("samples", "")]
        if restarts:
            said = row.get("restarts", {})
            cells += [_digits(said.get(key, "")) for key in ("num_restarts", "repeated_s", "starting_s")]
        lines.append([*cells, *(_digits((row.get("metrics") or {}).get(name, "")) for name in metrics)])
    return table([*head, *metrics], lines)


def _digits(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _speed_up(rows: Rows, strategies: Sequence[str], limits: Rows) -> str:
    """Of every strategy, with the ideal, and with what the fitted curve cannot pass."""
    drawing, axes = new_axes(("workers", "speed-up over one device"))
    most = max((row["workers"] for row in rows), default=1)
    axes.plot([1, most], [1, most], color="#999999", linestyle=":", label="ideal")
    highest = max([float(row["speed_up"]) for row in rows], default=1.0)
    for strategy, colour in zip(strategies, colours(), strict=False):
        points = [(row["workers"], row["speed_up"]) for row in rows if row["strategy"] == strategy]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=strategy)
        bound = next((one["speed_up"] for one in limits if one["strategy"] == strategy), None)
        if bound is not None and bound < 3 * highest:
            axes.axhline(bound, color=colour, linestyle="--", linewidth=0.8)
    axes.set_ylim(0, None)
    return figure(to_svg(drawing, axes, legend=True), "Speed-up; dashed: what the fitted curve cannot pass")


def _losses(rows: Rows, strategies: Sequence[str]) -> Iterable[str]:
    """One figure for each number of workers, one line for each strategy; so for each metric of the validations."""
    for number in dict.fromkeys(row["workers"] for row in rows):
        runs = [row for row in rows if row["workers"] == number and row.get("loss_curve")]
        if not runs:
            continue
        workers = f"{number} worker{'s' * (number > 1)}"
        yield _lines(runs, strategies, "loss_curve", "loss", f"Training loss, {workers}")
        metrics = dict.fromkeys(name for row in runs for name in row["metrics"])
        for name in metrics:
            yield _lines(runs, strategies, "validations", name, f"Validation: {name}, {workers}")


def _lines(rows: Rows, strategies: Sequence[str], key: str, value: str, caption: str) -> str:
    drawing, axes = new_axes(("virtual seconds", value))
    for row in rows:
        points = [
            (one["virtual_s"], one[value]) for one in row[key] if isinstance(one.get(value), int | float)
        ]
        colour = COLOURS[strategies.index(row["strategy"]) % len(COLOURS)]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, marker="o", markersize=2, label=row["strategy"]
            )
    return figure(to_svg(drawing, axes, legend=True), caption)


def _timelines(rows: Rows) -> Iterable[str]:
    """What every rank did in the traced steps."""
    traced = [
        (row, spans) for row in rows if "run_dir" in row and (spans := read_spans(Path(row["run_dir"])))
    ]
    if not traced:
        return
    yield '<h2>Timelines</h2><div class="figures">'
    for row, spans in traced[:MOST_TIMELINES]:
        yield figure(
            _timeline(spans), f"{row['strategy']}, {row['workers']} workers: the traced steps of each rank"
        )
    yield (
        '</div><p class="note">chrome://tracing and ui.perfetto.dev open the files trace-rank-*.json of the run '
        "directories, in which messages stand, too.</p>"
    )


def _timeline(spans: Mapping[int, Sequence[Span]]) -> str:
    shown = dict(list(spans.items())[:MOST_BARS])
    drawing, axes = new_axes(("virtual seconds", "rank"), height=max(1.6, 0.7 + 0.18 * len(shown)))
    used = [
        name for name in CATEGORIES if any(one.category == name for found in shown.values() for one in found)
    ]
    for name in used:
        axes.plot([], [], color=_colour(name), linewidth=5, label=name)
    for place, found in enumerate(shown.values()):
        for order, name in enumerate(CATEGORIES):
            bars = [(one.began_s, one.took_s) for one in found if one.category == name]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=_colour(name), linewidth=0, zorder=2 + order)
    axes.set_yticks(range(len(shown)), [str(rank) for rank in shown])
    axes.invert_yaxis()
    axes.legend(
        fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, len(used))
    )
    return to_svg(drawing, axes, legend=False)


def _colour(category: str) -> str:
    return COLOURS[CATEGORIES.index(category) % len(COLOURS)]
