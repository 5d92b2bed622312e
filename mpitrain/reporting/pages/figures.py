"""The figures of pages, as SVG texts that stand in a page by themselves.

Invariants: the same runs give the same text. Names come from users and are never read as markup or as mathematics.
Colours are named by number and inks by role, which the style sheet of the page turns into those of light and dark;
lines keep their width and letters their size whatever the width of the page. Every figure says in words what it shows.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpitrain.errors import UsageError, printable
from mpitrain.reporting.pages.look import within_colours
from mpitrain.system.saying import html_text
from mpitrain.system.sizes import counted

MOST_BARS = 64  # ranks that have bars of their own
# What matplotlib is told, and what becomes of it.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8548e", "#b37d00", "#3a9bd9", "#1b1f24", "#8a8f95")
_INK, _SOFT, _GRID = "#010203", "#040506", "#070809"
_VARIABLES = {one: f"var(--c{number})" for number, one in enumerate(COLOURS, 1)} | {
    _INK: "var(--ink)", _SOFT: "var(--soft)", _GRID: "var(--grid)",
}  # fmt: skip
_LOOKS = {"line": ("-", 2.0), "thin": ("-", 1.2), "dashed": ("--", 1.5), "dotted": (":", 1.5)}
_WIDTH, _HEIGHT, _LETTERS = 400.0, 230.0, 13.0  # in points, of which the page makes pixels
_DOTS_UP_TO = 40  # points of a line


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


def colour(number: int) -> str:
    """What matplotlib is told of a colour, which are counted from 1, without end."""
    return COLOURS[within_colours(number) - 1]


class Drawing:
    """One figure.

    Args:
        x: what the horizontal axis counts.
        height: in points; log: whether the vertical axis is logarithmic; counts: whether only whole numbers stand at
            the horizontal one.
    """

    def __init__(self, x: str, height: float = _HEIGHT, log: bool = False, counts: bool = False):
        from_left, from_right, above, below = 52.0, 16.0, 10.0, 40.0
        self._figure = check_drawing()(figsize=(_WIDTH / 72, height / 72), facecolor="none")
        share = (1 - from_left / _WIDTH - from_right / _WIDTH, 1 - above / height - below / height)
        self.axes = axes = self._figure.add_axes(
            (from_left / _WIDTH, below / height, *share), facecolor="none"
        )
        axes.set_xlabel(x, parse_math=False, color=_SOFT, fontsize=_LETTERS, labelpad=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_SOFT)
        axes.tick_params(labelsize=_LETTERS, labelcolor=_INK, color=_SOFT)
        axes.grid(color=_GRID, linewidth=1)
        axes.set_axisbelow(True)
        self._place_ticks(log, counts)
        self._told: list[str] = []

    def _place_ticks(self, log: bool, counts: bool) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

        if log:
            self.axes.set_yscale("log")
            self.axes.yaxis.set_major_locator(LogLocator(numticks=5))
            self.axes.yaxis.set_minor_locator(NullLocator())
        else:
            self.axes.yaxis.set_major_locator(MaxNLocator(5))
        self.axes.xaxis.set_major_locator(MaxNLocator(5, integer=counts, min_n_ticks=1))
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        number: int,
        look: str = "line",
        dots: bool = False,
        name: str = "",
    ) -> None:
        """A line in the colour of this number; `name`: what it is, for those who do not see it."""
        style, width = _LOOKS[look]
        few = dots and len(xs) <= _DOTS_UP_TO
        self.axes.plot(
            xs, ys, style, color=colour(number), linewidth=width, marker="o" if few or len(xs) == 1 else "",
            markersize=4, alpha=0.75 if look == "thin" else 1,
        )  # fmt: skip
        if name and len(ys):
            self.tell(f"{name}: {counted(len(ys), 'point')}, from {compact(ys[0])} to {compact(ys[-1])}")

    def level(self, value: float, number: int = 0, name: str = "") -> None:
        """A dashed line across at this height, 0 in the colour of letters."""
        style, width = _LOOKS["dashed"]
        self.axes.axhline(value, color=colour(number) if number else _SOFT, linestyle=style, linewidth=width)
        self.tell(f"{name}: {compact(value)}")

    def tell(self, what: str) -> None:
        """Say in words what was drawn."""
        self._told.append(what)

    def svg(self, title: str, kind: str = "") -> str:
        """The figure as text, with what it shows for those who do not see it; `kind`: a class of the style sheet."""
        import matplotlib
        import matplotlib.text

        for one in self._figure.findobj(matplotlib.text.Text):  # matplotlib draws letters only
            one.set_text(printable(one.get_text()))
        out = io.StringIO()
        salt = printable(f"mpitrain {title} {kind}")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
            self._figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        return printable(_finished(out.getvalue(), title, "; ".join(self._told), kind))


def label_ranks(drawing: Drawing, ranks: Sequence[object]) -> None:
    """A row of the figure for each of these, the first at the top; the numbers of at most sixteen stand beside it."""
    step = math.ceil(len(ranks) / 16)
    drawing.axes.set_yticks(range(0, len(ranks), step), [str(one) for one in ranks[::step]])
    drawing.axes.invert_yaxis()


def _finished(drawn: str, title: str, told: str, kind: str) -> str:
    """What matplotlib has drawn, for a page: in its colours, without the names of parts that nothing refers to."""
    body = drawn.partition("<svg")[2].partition(">")
    inside = re.sub(r"<metadata>.*?</metadata>", "", body[2], flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)", inside))
    inside = re.sub(r' id="([^"]*)"', lambda at: at[0] if at[1] in used else "", inside)
    for told_colour, variable in _VARIABLES.items():
        inside = inside.replace(told_colour, variable)
    view = re.search(r'viewBox="[^"]*"', body[0])
    assert view is not None
    shown = f' class="{kind}"' if kind else ""
    label = f"<title>{html_text(title)}</title><desc>{html_text(told)}</desc>"
    return f'<svg role="img" {view[0]}{shown} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{label}{inside}'


def compact(value: float) -> str:
    """A number in few letters: 0.9721, 15k, 2.5M, 5e-4."""
    size = abs(float(f"{value:.4g}"))  # as it will be written: 9999.7 is 10k
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if least <= size < math.inf:
            return f"{value / (1e3 if unit == 'k' else least):.4g}{unit}"
    if 0 < size < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def count_text(value: float) -> str:
    """Samples, or samples per second: 12,346, 12.3, 0.123."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """What a time of this length is counted in, and its seconds."""
    return next(
        ((name, of) for name, of in (("hours", 3600.0), ("minutes", 60.0)) if seconds >= 2 * of),
        ("seconds", 1.0),
    )


def pieces(rows: Iterable[dict[str, Any]], x: str, value: str) -> Iterable[tuple[list[float], list[float]]]:
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


def both_ways(title: str, draw: Callable[[str], Drawing]) -> str:
    """The drawing by samples and by time, of which the page shows one; `draw` is handed "samples" or "trained_s"."""
    return draw("samples").svg(title, "by-samples") + draw("trained_s").svg(title, "by-time")
