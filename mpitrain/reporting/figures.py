"""The figures of a report, as SVG texts that stand in a page by themselves.

Invariants: the same runs give the same text. Names come from users and are never read as markup or as mathematics.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpitrain.errors import UsageError, printable
from mpitrain.reporting.run_files import Row, RunFiles

MOST_BARS = 64  # ranks that have bars of their own
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#999999",
)  # Okabe and Ito
SHARES = {"compute_s": "computing", "wait_s": "waiting", "checkpoint_s": "checkpoints", "rest_s": "the rest"}


def curves(
    runs: Sequence[RunFiles],
    rows_of: Callable[[RunFiles], list[Row]],
    value: str,
    x: str,
    labels: tuple[str, str],
) -> str:
    """One line a run: `value` of the rows against `x` ("samples" or "at_s"); broken where a run was started again."""
    figure, axes = new_axes(labels)
    for run, colour in zip(runs, colours(), strict=False):
        pieces = list(_pieces(rows_of(run), x, value))
        for number, (xs, ys) in enumerate(pieces):
            marker = "o" if max(len(piece[0]) for piece in pieces) < 40 else ""
            axes.plot(xs, ys, color=colour, marker=marker, markersize=3, label="" if number else run.name)
    return to_svg(figure, axes, legend=len(runs) > 1)


def histogram(runs: Sequence[RunFiles]) -> str:
    """Share of the pushes by staleness."""
    figure, axes = new_axes(("staleness (versions)", "share of pushes"))
    width = 0.8 / len(runs)
    for number, (run, colour) in enumerate(zip(runs, colours(), strict=False)):
        counts = {int(key): int(value) for key, value in run.result["staleness_histogram"].items()}
        total = sum(counts.values()) or 1
        places = [tau + (number + 0.5) * width - 0.4 for tau in counts]
        axes.bar(places, [one / total for one in counts.values()], width, color=colour, label=run.name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return to_svg(figure, axes, legend=len(runs) > 1)


def shares(run: RunFiles) -> str:
    """What each worker's time went into."""
    found = worker_times(run)
    step = math.ceil(len(found) / MOST_BARS)
    found = found[::step]
    figure, axes = new_axes(("seconds", "rank"), height=max(1.6, 0.7 + 0.18 * len(found)))
    left = [0.0] * len(found)
    for (key, text), colour in zip(SHARES.items(), COLOURS, strict=False):
        widths = [one[key] for one in found]
        if any(widths):
            axes.barh(range(len(found)), widths, left=left, color=colour, label=text)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), [str(one["rank"]) for one in found])
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(SHARES))
    return to_svg(figure, axes, legend=False)


def worker_times(run: RunFiles) -> list[dict[str, Any]]:
    """Seconds of each worker's training by what they went into; `rest_s` is what is left of the run's training."""
    whole = float(run.result.get("train_s") or run.result.get("virtual_s") or 0.0)
    found = []
    for one in run.result.get("ranks") or run.result.get("per_worker") or ():
        if one.get("role", "worker") != "worker" or "compute_s" not in one:
            continue
        kept = one.get("checkpoints") or {}
        times = {
            "compute_s": float(one["compute_s"]),
            "wait_s": float(one.get("wait_s", 0.0)),
            "checkpoint_s": float(kept.get("copy_s", 0.0)) + float(kept.get("wait_s", 0.0)),
        }
        found.append({"rank": one["rank"], **times, "rest_s": max(0.0, whole - sum(times.values()))})
    return found


def colours() -> Iterable[str]:
    """Colours without end."""
    while True:
        yield from COLOURS


def _pieces(rows: list[Row], x: str, value: str) -> Iterable[tuple[list[float], list[float]]]:
    """Runs of points between which training never went back to an earlier sample; numbers only."""
    xs: list[float] = []
    ys: list[float] = []
    samples = 0.0
    for row in rows:
        at, y = row.get(x), row.get(value)
        if not isinstance(at, int | float) or not isinstance(y, int | float) or not math.isfinite(y):
            continue
        before, samples = samples, float(row.get("samples") or 0)
        if xs and (at < xs[-1] or samples < before):
            yield xs, ys
            xs, ys = [], []
        xs.append(float(at))
        ys.append(float(y))
    if xs:
        yield xs, ys


def check_drawing() -> Any:
    """matplotlib's class of figures.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "pages are drawn with matplotlib, which is not installed: pip install 'mpitrain[plot]'"
        ) from None
    return Figure


def new_axes(labels: tuple[str, str], height: float = 3.0) -> tuple[Any, Any]:
    """(a figure, its axes with these labels). `height`: in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    Figure = check_drawing()
    figure = Figure(figsize=(6.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(labels[0], parse_math=False)
    axes.set_ylabel(labels[1], parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def to_svg(figure: Any, axes: Any, legend: bool) -> str:
    """The figure as text; `legend`: with one, where lines have labels."""
    import matplotlib.text

    if legend and axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize="small", frameon=False).get_texts():
            text.set_parse_math(False)
    for text in figure.findobj(matplotlib.text.Text):  # matplotlib draws letters only
        text.set_text(printable(text.get_text()))
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mpitrain"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return printable("<svg" + out.getvalue().partition("<svg")[2])
