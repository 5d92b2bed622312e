"""The pictures of `docs/pictures`: `make docs` draws them from `families.py` and from `pictures/characters.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs import characters, drawing
from docs.drawing import WIDTH, Axes, Point, colour, line, text
from docs.families import FAMILIES, Family

FOLDER = Path(__file__).resolve().parent / "pictures"
BOX = (116.0, 38.0)


SHARE = "share of the gradients that are at most so many versions old"
CURVES = {
    "allreduce": Axes("Allreduce: speed-up by workers", "workers", "times one worker", True, top=64),
    "parameter-servers": Axes("What spare workers save and drop, out of 16", "spare workers", "share", top=1),
    "asynchronous-servers": Axes("One of eight workers is 4 times as slow", "versions", SHARE, top=1),
    "local-sgd": Axes(
        "Speed-up of 8 workers over gigabit Ethernet",
        "steps between averagings",
        "times one worker",
        True,
        top=8,
    ),
    "decentralized": Axes("Speed-up of peers over 10 Gbit/s", "peers", "times one worker", True, top=32),
    "split-models": Axes(
        "How long the stages of a pipeline idle", "microbatches", "share of a step", True, top=1
    ),
    "losses": Axes(
        "One of eight workers is 4 times as slow", "virtual seconds", "validation loss", powers=True
    ),
}
IDEAL = ("allreduce", "decentralized")  # have a line of N times


def who_to_whom(family: Family) -> str:
    """Ranks as boxes, and an arrow for everything that travels."""
    places: dict[str, Point] = {}
    for row, ranks in enumerate(family.rows):
        wide = 150 if len(ranks) == 3 else 220
        for at, rank in enumerate(ranks):
            places[rank] = (WIDTH / 2 + (at - (len(ranks) - 1) / 2) * wide, 34 + 130 * row)
    kinds = list(dict.fromkeys(arrow.what for arrow in family.arrows))
    parts = []
    for arrow in family.arrows:
        pairs = [(arrow.source, arrow.target)] + [(arrow.target, arrow.source)] * arrow.there_too
        alone = not any(
            (arrow.target, arrow.source) == (other.source, other.target) for other in family.arrows
        )
        for source, target in pairs:
            shift = 0.0 if alone and not arrow.there_too else 5.0
            points = drawing.between(places[source], places[target], (BOX[0] / 2, BOX[1] / 2), shift)
            parts.append(line(points, colour(kinds.index(arrow.what)), 2, head=True))
    parts += [
        drawing.box(at, *BOX, rank, "var(--c5)" if rank.startswith("server") else "var(--faint)")
        for rank, at in places.items()
    ]
    named, bottom = drawing.legend(kinds, 70 + 130 * (len(family.rows) - 1) + 24)
    told = "; ".join(
        f"{arrow.source} {'and' if arrow.there_too else 'to'} {arrow.target}"
        f"{' to one another' if arrow.there_too else ''}: {arrow.what}"
        for arrow in family.arrows
    )
    title = f"{family.title}: who sends what to whom"
    return drawing.drawing(f"who-{family.key}", title, told, bottom - 6, parts + named)


def curve(key: str, runs: dict[str, Any]) -> str:
    """The chart of a family."""
    axes, curves = CURVES[key], dict(runs[key])
    if key in IDEAL:
        counts = sorted({int(x) for points in curves.values() for x, _ in points})
        curves["ideal"] = [(count, count) for count in counts]
    parts, height = drawing.chart(curves, axes)
    told = "; ".join(f"{name}: {_read(points)}" for name, points in curves.items())
    return drawing.drawing(f"curve-{key}", f"{axes.title}: {axes.up} by {axes.across}", told, height, parts)


def _read(points: Sequence[Sequence[float]]) -> str:
    """The ends of a curve in words."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    return f"{y0:.3g} at {x0:g} and {y1:.3g} at {x1:g}"


def timeline(strategy: str, traced: dict[str, Any], until: float = 6.4) -> str:
    """What every rank does in the first seconds, and what travels between them."""
    lanes = traced["lanes"]
    across = drawing.Scale(0, until, 78, WIDTH - 10)
    middles = [52 + 52 * at for at in range(len(lanes))]
    kinds = [
        kind
        for kind in ("Push", "Reply", "Update", "allreduce")
        if any(one[0] == kind for one in traced["messages"])
    ]
    parts = [text((8, 18), f"{strategy}; the last is half as fast")]
    for lane, y in zip(lanes, middles, strict=True):
        parts += [
            text((8, y + 5), lane["name"] if kinds != ["Update"] else lane["name"].replace("worker", "peer")),
            line([(78, y), (WIDTH - 10, y)], "var(--grid)", 1),
        ]
        parts += [
            _bar(across(begin), across(min(end, until)), y)
            for kind, begin, end in lane["spans"]
            if kind == "compute" and begin < until
        ]
    for kind, source, target, begin, end in traced["messages"]:
        if kind not in kinds or end > until:
            continue
        stroke = colour(1 + kinds.index(kind))
        if target < 0:
            parts.append(
                line([(across(begin), middles[source] + 13), (across(end), middles[source] + 13)], stroke, 4)
            )
        else:
            way = 1 if target > source else -1
            ends = [(across(begin), middles[source] + 10 * way), (across(end), middles[target] - 10 * way)]
            parts.append(line(ends, stroke, 1.5, head=True))
    bottom = middles[-1] + 34
    parts.append(text((WIDTH - 10, bottom + 4), "time, from left to right", "end", "var(--faint)"))
    names = {
        "Push": "a gradient to the server",
        "Reply": "parameters to the worker",
        "Update": "to a neighbour",
        "allreduce": "averaging among all",
    }
    named, bottom = drawing.legend(["computing", *(names[kind] for kind in kinds)], bottom + 26)
    told = "Of three ranks that compute the last one is half as fast. A gap in a lane is a wait."
    return drawing.drawing(
        f"time-{_file(strategy)}", f"{strategy}: what every rank does", told, bottom - 6, parts + named
    )


def _bar(begin: float, end: float, y: float) -> str:
    width = max(end - begin - 1.5, 1)
    return (
        f'<rect x="{drawing.number(begin)}" y="{drawing.number(y - 9)}" width="{drawing.number(width)}" height="18" '
        'rx="2" fill="var(--c1)"/>'
    )


def _file(strategy: str) -> str:
    return strategy.partition("(")[0]


def made() -> dict[Path, str]:
    """Every picture by its file."""
    recorded = characters.recorded()
    found = {FOLDER / f"who-{family.key}.svg": who_to_whom(family) for family in FAMILIES}
    found |= {FOLDER / f"curve-{key}.svg": curve(key, recorded["runs"]) for key in CURVES}
    found |= {
        FOLDER / f"time-{_file(text)}.svg": timeline(text, traced)
        for text, traced in recorded["timelines"].items()
    }
    return found
