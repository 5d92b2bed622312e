"""Where time went, and how stale gradients were: the figures of a page about a run rather than about its model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mpitrain.reporting.pages.curves import Shown
from mpitrain.reporting.pages.figures import MOST_BARS, Drawing, colour, label_ranks
from mpitrain.reporting.pages.html_page import Key, Number, figure, figures, paragraphs, table, text
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.traced_time import CATEGORIES

SHARES = {"compute_s": "computing", "wait_s": "waiting", "checkpoint_s": "checkpoints", "rest_s": "the rest"}


def sections(of: Shown) -> Iterable[str]:
    """All of it, as far as the runs have left it."""
    found = [*_times(of), *_staleness(of)]
    several = "" if of.is_one else _times_of_several(of)
    if found or several:
        yield "<h2>Where the time went</h2>"
    yield several
    yield figures(found)
    yield from _traces(of)


def _staleness(of: Shown) -> Iterable[str]:
    stale = [(run, name, number) for run, name, number in of.each() if run.result.get("staleness_histogram")][
        ::-1
    ]
    if not stale:
        return
    drawing = Drawing("versions", counts=True)
    width = 0.8 / len(stale)
    for place, (run, name, number) in enumerate(stale):
        counts = {int(key): int(value) for key, value in run.result["staleness_histogram"].items()}
        total = sum(counts.values()) or 1
        places = [tau + (place + 0.5) * width - 0.4 for tau in counts]
        drawing.axes.bar(places, [100 * one / total for one in counts.values()], width, color=colour(number))
        drawing.tell(
            f"{name}: mostly {max(counts, key=lambda tau: counts[tau])}, at most {max(counts)} versions"
        )
    note = "Percent of the pushes, by versions between what a gradient was computed from and what it was applied to."
    keys = [] if of.is_one else [Key(name, number, "area") for _, name, number in stale]
    yield figure(drawing.svg("Staleness"), "Staleness", note, keys)


def _times(of: Shown) -> Iterable[str]:
    times = worker_times(of.runs[0])
    if of.is_one and times:
        some = f" ({MOST_BARS} of {len(times)} at most)" if len(times) > MOST_BARS else ""
        title = f"The workers' time{some}"
        keys = [
            Key(what, number, "area")
            for number, (part, what) in enumerate(SHARES.items(), 1)
            if any(one[part] for one in times)
        ]
        yield figure(shares(of.runs[0], title), title, "Seconds of each worker's training, by rank.", keys)


def _times_of_several(of: Shown) -> str:
    """The mean over each run's workers."""
    found = [
        (name, times) for run, name in zip(of.runs, of.names, strict=True) if (times := worker_times(run))
    ]
    used = [part for part in SHARES if any(one[part] for _, times in found for one in times)]
    rows: list[list[Any]] = []
    for name, times in found:
        means = [sum(one[part] for one in times) / len(times) for part in used]
        whole = sum(means) or 1.0
        rows.append([name, *(Number(mean, f"{mean:.3g} s ({100 * mean / whole:.0f} %)") for mean in means)])
    return table(["mean of the workers", *(SHARES[part] for part in used)], rows) if rows else ""


def shares(run: RunFiles, title: str) -> str:
    """What each worker's time went into."""
    found = worker_times(run)
    found = found[:: math.ceil(len(found) / MOST_BARS)]
    drawing = Drawing("seconds", height=64 + 18 * len(found))
    left = [0.0] * len(found)
    for number, (key, what) in enumerate(SHARES.items(), 1):
        widths = [one[key] for one in found]
        if any(widths):
            drawing.axes.barh(range(len(found)), widths, left=left, color=colour(number))
            left = [a + b for a, b in zip(left, widths, strict=True)]
            drawing.tell(f"{what}: {sum(widths) / len(widths):.3g} s in the mean")
    label_ranks(drawing, [one["rank"] for one in found])
    return drawing.svg(title)


def worker_times(run: RunFiles) -> list[dict[str, Any]]:
    """Seconds of each worker's training by what they went into; `rest_s` is what is left of the run's training."""
    whole = run.training_s or 0.0
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


def _traces(of: Shown) -> Iterable[str]:
    """The share of each category in the traced steps of each rank."""
    traced = [(name, found) for run, name in zip(of.runs, of.names, strict=True) if (found := run.traced())]
    if not traced:
        return
    yield "<h2>Traced steps</h2>"
    for run_name, found in traced:
        if not of.is_one:
            yield f"<h3>{text(run_name)}</h3>"
        names = [name for name in CATEGORIES if any(one.seconds[name] for one in found)]
        rows = []
        for one in found[:MOST_BARS]:
            total = sum(one.seconds.values()) or 1.0
            parts = [f"{100 * one.seconds[name] / total:.1f} %" for name in names]
            rows.append([one.label, one.num_steps or "", _seconds(total / max(1, one.num_steps)), *parts])
        yield table(["rank", "steps", "a step, or all", *names], rows)
    note = (
        "Of the main thread of each rank; of a server, of the time that it has recorded. chrome://tracing and "
        "ui.perfetto.dev open the files trace-rank-*.json of the run directory."
    )
    yield from paragraphs([note], "note")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
