"""Drawings as SVG: ranks with arrows, lanes of time, curves.

Invariants: the same input gives the same text; every drawing has a title for screen readers; colours are variables, of
which each drawing brings values for light and dark, and which a page that holds it may set itself; text is at least
14 units high of a width of 480, so 10 pixels on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, TEXT = 480, 14
Point = tuple[float, float]
LIGHT = ("#1f2328", "#6a737d", "#d0d7de", "#ffffff", "#0069a8", "#b34700", "#00785a", "#8a4f9e", "#7a6200")
DARK = ("#e6e6e6", "#9aa4ae", "#3d444d", "#131416", "#5cb3f0", "#f28c4b", "#3fcf9f", "#d09be6", "#e3c34f")
NAMES = ("ink", "faint", "grid", "paper", "c1", "c2", "c3", "c4", "c5")
DASHES = ("", "7 4", "2 4", "10 3 2 3", "1 6", "14 5")


def _values(colours: Sequence[str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in zip(NAMES, colours, strict=True))


STYLE = (
    f"<style>.drawing{{{_values(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{.drawing{{{_values(DARK)}}}}}</style>"
)


def colour(number: int) -> str:
    return f"var(--c{number % 5 + 1})"


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def drawing(key: str, title: str, told: str, height: float, parts: Iterable[str]) -> str:
    """The whole file. `told` is what a reader who cannot see it is told besides the title."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {WIDTH} {number(height)}" role="img" '
        f'aria-labelledby="{key}-title {key}-desc" font-family="system-ui, sans-serif" font-size="{TEXT}">'
    )
    named = f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(told)}</desc>'
    paper = f'<rect width="{WIDTH}" height="{number(height)}" fill="var(--paper)"/>'
    return "\n".join([head, named, STYLE, paper, *parts, "</svg>"]) + "\n"


def text(at: Point, said: str, anchor: str = "start", fill: str = "var(--ink)", more: str = "") -> str:
    x, y = at
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(said)}</text>'


def line(points: Sequence[Point], stroke: str, width: float = 2, dash: str = "", head: bool = False) -> str:
    """A line through points; with an arrow's head at its end."""
    path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    drawn = f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'
    return drawn + (_head(points[-2], points[-1], stroke, 4 + 2 * width) if head else "")


def _head(before: Point, at: Point, fill: str, size: float) -> str:
    angle = math.atan2(at[1] - before[1], at[0] - before[0])
    corners = [at] + [
        (at[0] - size * math.cos(angle + turn), at[1] - size * math.sin(angle + turn))
        for turn in (0.42, -0.42)
    ]
    return f'<path d="M{"L".join(f"{number(x)} {number(y)}" for x, y in corners)}Z" fill="{fill}"/>'


def box(centre: Point, width: float, height: float, said: str, stroke: str) -> str:
    x, y = centre[0] - width / 2, centre[1] - height / 2
    frame = (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="8" '
        f'fill="var(--paper)" stroke="{stroke}" stroke-width="2"/>'
    )
    return frame + text((centre[0], centre[1] + 5), said, "middle")


def between(a: Point, b: Point, half: tuple[float, float], shift: float) -> list[Point]:
    """The part of the line from box to box that lies outside of both, moved aside to its right by `shift`."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    length = math.hypot(dx, dy)
    across = (-dy / length * shift, dx / length * shift)
    reach = min(half[0] / abs(dx) if dx else math.inf, half[1] / abs(dy) if dy else math.inf)
    gap = reach + 7 / length
    return [(a[0] + dx * share + across[0], a[1] + dy * share + across[1]) for share in (gap, 1 - gap)]


def legend(
    names: Sequence[str], top: float, dashes: Sequence[str] = (), left: float = 12
) -> tuple[list[str], float]:
    """A row for each line, and how far down they reach."""
    parts = []
    for at, name in enumerate(names):
        y = top + 20 * at
        dash = dashes[at] if dashes else ""
        parts += [
            line([(left, y - 5), (left + 34, y - 5)], colour(at), 2.5, dash),
            text((left + 42, y), name),
        ]
    return parts, top + 20 * len(names)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * by for by in (1, 2, 5, 10) if (high - low) / (step * by) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 10) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        value for power in powers for by in (1, 2, 5) if low <= (value := round(by * 10.0**power, 10)) <= high
    ]


class Scale:
    """From values to places; `doubling` counts doublings."""

    def __init__(self, low: float, high: float, begin: float, end: float, doubling: bool = False):
        self.of = math.log2 if doubling else float
        self.low, self.high, self.begin, self.end = self.of(low), self.of(high), begin, end

    def __call__(self, value: float) -> float:
        share = (self.of(value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


class Axes(NamedTuple):
    """What a chart says and spans: its title, what the lower and the upright axis count; whether the lower one counts
    doublings, the upright one powers; where that ends."""

    title: str
    across: str
    up: str
    doubling: bool = False
    powers: bool = False
    top: float | None = None


def chart(curves: dict[str, Sequence[Sequence[float]]], axes: Axes) -> tuple[list[str], float]:
    """Curves over one pair of axes with a legend below, and the height of all that."""
    xs = sorted({point[0] for points in curves.values() for point in points})
    ys = [point[1] for points in curves.values() for point in points]
    high, low = axes.top or max(ys), min(ys) if axes.powers else 0
    across = Scale(xs[0] if axes.doubling else 0, xs[-1], 52, WIDTH - 16, axes.doubling)
    up = Scale(low, high, 258, 58, axes.powers)
    parts = [text((8, 18), axes.title), text((8, 40), axes.up, fill="var(--faint)")]
    for value in decades(low, high) if axes.powers else ticks(0, high):
        parts += [
            line([(52, up(value)), (WIDTH - 16, up(value))], "var(--grid)", 1),
            text((46, up(value) + 5), f"{value:g}", "end", "var(--faint)"),
        ]
    for value in xs if axes.doubling else ticks(0, xs[-1]):
        parts.append(text((across(value), 278), f"{value:g}", "middle", "var(--faint)"))
    parts.append(text((WIDTH - 16, 298), axes.across, "end", "var(--faint)"))
    for at, points in enumerate(curves.values()):
        placed = [(across(x), up(min(y, high))) for x, y in points]
        parts.append(line(placed, colour(at), 2.5, DASHES[at % len(DASHES)]))
    named, bottom = legend(list(curves), 322, [DASHES[at % len(DASHES)] for at in range(len(curves))])
    return parts + named, bottom - 6
