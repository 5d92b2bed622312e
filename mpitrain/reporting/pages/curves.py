"""The pictures of a page of runs: losses, metrics, families of metrics, throughput.

Invariants: what changed most stands first, and what did not change is a sentence, as is what was measured once: there
is no empty picture. A picture of several runs has a line for each, in the colour that the run has everywhere; beyond
the colours there are, runs share the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mpitrain.reporting.families import Family, families
from mpitrain.reporting.pages.figures import Drawing, both_ways, compact, pieces, time_unit
from mpitrain.reporting.pages.html_page import SWITCH, Key, figure, figures, folded, keys, paragraphs, table
from mpitrain.reporting.pages.look import NUM_COLOURS
from mpitrain.reporting.rows import Row, metrics_in
from mpitrain.reporting.run_files import RunFiles
from mpitrain.reporting.targets import LOSS, Choice, goals_among, read_target

LOSSES = "Loss"
MOST_MARKED = 3  # of a family that has more members than there are colours
MOST_OPEN = 6  # metrics that have a picture before the rest is folded


@dataclass(frozen=True)
class Shown:
    """The runs of a page as its pictures show them: the best first, each with its name and the number of its colour."""

    runs: tuple[RunFiles, ...]
    names: tuple[str, ...]
    colours: tuple[int, ...]
    by: Choice | None

    @property
    def is_one(self) -> bool:
        return len(self.runs) == 1

    def each(self) -> Iterable[tuple[RunFiles, str, int]]:
        """Run, name and colour; the last is drawn first, so that the best lies on top."""
        return reversed(list(zip(self.runs, self.names, self.colours, strict=True)))


def shown(
    runs: Sequence[RunFiles], names: Sequence[str], best: Sequence[RunFiles], by: Choice | None
) -> Shown:
    """`best`: runs in the order of their rank; others keep their place behind them."""
    order = [one.folder for one in best]
    ranks = {run.folder: order.index(run.folder) if run.folder in order else len(order) for run in runs}
    both = sorted(zip(runs, names, strict=True), key=lambda pair: ranks[pair[0].folder])
    num_own = NUM_COLOURS if len(runs) <= NUM_COLOURS else NUM_COLOURS - 1
    colours = tuple(min(number, num_own) + 1 for number in range(len(runs)))
    return Shown(tuple(run for run, _ in both), tuple(name for _, name in both), colours, by)


def curves(of: Shown) -> Iterable[str]:
    """All pictures, with the legend of the runs above them."""
    metrics = list(
        dict.fromkeys(
            name for run in of.runs for row in run.of_kind("validation") for name in metrics_in(row)
        )
    )
    main = [name for name in dict.fromkeys((of.by.metric if of.by else LOSS, LOSS)) if name in metrics]
    open_ones, folds, sentences = _sorted_out(of, metrics, main)
    drawn = [*_loss(of), *(one for name in open_ones for one in _metric(of, name)), *_throughput(of)]
    sentences += [
        *_once(of, list(dict.fromkeys([*main, *metrics]))[:MOST_OPEN]),
        *([] if drawn else ["There are not yet points enough for a picture."]),
    ]
    yield "<h2>Curves</h2>"
    yield from paragraphs(sentences, "note")
    if drawn or folds:
        yield SWITCH
    if not of.is_one:
        yield keys(legend(of))
    yield figures(drawn)
    yield from folds


def legend(of: Shown) -> list[Key]:
    """Each run once; those that share a colour together."""
    found = [
        Key(name, colour)
        for name, colour in zip(of.names, of.colours, strict=True)
        if colour < of.colours[-1]
    ]
    last = [name for name, colour in zip(of.names, of.colours, strict=True) if colour == of.colours[-1]]
    return [*found, Key(last[0] if len(last) == 1 else f"{len(last)} other runs", of.colours[-1])]


def _sorted_out(
    of: Shown, metrics: Sequence[str], main: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """(metrics that have a picture at once, what is folded, sentences on those that need none)."""
    changes = {name: _change(of, name) for name in metrics}
    known = [name for name in metrics if name in main or _num_points(of, name) > 1]
    groups = (
        families(known, alone=main) if len(known) > MOST_OPEN else [Family(name, (name,)) for name in known]
    )
    moved = {one: max(changes[name] for name in one.names) for one in groups}
    still = [one.pattern for one in groups if not moved[one] and one.pattern not in main]
    moving = sorted((one for one in groups if one.pattern not in (LOSS, *still)), key=lambda one: -moved[one])
    alone = [one.pattern for one in moving if len(one.names) == 1]
    alone.sort(key=lambda name: name not in main)
    folds = [
        folded(f"{one.pattern}: {len(one.names)} metrics", "".join(_family(of, one, changes)))
        for one in moving
        if len(one.names) > 1
    ]
    if rest := alone[MOST_OPEN:]:
        drawn = [one for name in rest for one in _metric(of, name)]
        folds.append(folded(f"{len(rest)} more metrics, which changed less", figures(drawn)))
    sentences = [f"Unchanged from the first validation to the last: {', '.join(still)}."] if still else []
    return alone[:MOST_OPEN], folds, sentences


def _points(run: RunFiles, name: str) -> list[tuple[Row, float]]:
    return [(row, value) for row in run.of_kind("validation") if _is_finite(value := row.get(name))]


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _num_points(of: Shown, name: str) -> int:
    return max((len(_points(run, name)) for run in of.runs), default=0)


def _change(of: Shown, name: str) -> float:
    """By how much it changed from its first value to the last, as a share of its size; of several runs the most, or
    what they differ by at the end."""
    ends = [[value for _, value in points] for run in of.runs if (points := _points(run, name))]
    size = max((abs(value) for values in ends for value in values), default=0.0) or 1.0
    last = [values[-1] for values in ends]
    spread = max(last, default=0.0) - min(last, default=0.0)
    moved = max((max(values) - min(values) for values in ends), default=0.0)
    within = max((abs(values[-1] - values[0]) for values in ends), default=0.0)
    return max(spread, within, 1e-9 if moved else 0.0) / size


def _once(of: Shown, names: Sequence[str]) -> Iterable[str]:
    """What was measured once has no curve."""
    for run, name, _ in of.each():
        rows = run.of_kind("validation")
        found = [f"{one} {compact(points[0][1])}" for one in names if (points := _points(run, one))]
        if found and len(rows) == 1:
            samples = int(rows[0].get("samples") or 0)
            before = "Validated" if of.is_one else f"{name}: validated"
            yield f"{before} once, after {samples:,} samples: {', '.join(found)}."


def _x_label(of: Shown, x: str) -> tuple[str, float]:
    """(what the axis counts, by what it is divided)."""
    if x == "samples":
        return "samples", 1.0
    unit, length = time_unit(max((row["trained_s"] for run in of.runs for row in run.rows), default=0.0))
    virtual = "virtual " if any("virtual_s" in row for run in of.runs for row in run.rows) else ""
    return f"{virtual}{unit} since the first step", length


Line = tuple[list[Row], str, Key]  # rows, the value of them that is drawn, how


def _picture(
    of: Shown,
    title: str,
    lines: Sequence[Line],
    note: str = "",
    those: Sequence[Key] = (),
    level: float | None = None,
) -> str:
    """The picture of these lines, by samples and by time; `level`: where a dashed line goes across."""
    values = [y for rows, value, _ in lines for _, ys in pieces(rows, "samples", value) for y in ys]
    log = title == LOSSES and min(values) > 0 and max(values) > 50 * min(values)

    def draw(x: str) -> Drawing:
        label, unit = _x_label(of, x)
        drawing = Drawing(label, log=log)
        for rows, value, key in lines:
            for number, (xs, ys) in enumerate(pieces(rows, x, value)):
                name = "" if number else key.text
                drawing.line([at / unit for at in xs], ys, key.colour, key.look, key.look != "thin", name)
        if level is not None:
            drawing.level(level, name="target")
        return drawing

    notes = " ".join([note, *(["The scale is logarithmic."] if log else [])]).strip()
    return figure(both_ways(title, draw), title, notes, those)


def _has_curve(lines: Sequence[Line]) -> bool:
    return any(len(xs) > 1 for rows, value, _ in lines for xs, _ in pieces(rows, "samples", value))


def _loss(of: Shown) -> Iterable[str]:
    """Training and validation loss in one picture."""
    lines: list[Line] = []
    for run, name, colour in of.each():
        lines.append(
            (run.of_kind("progress"), "loss", Key("training" if of.is_one else name, colour, "thin"))
        )
        lines.append(
            (run.of_kind("validation"), LOSS, Key("validation", 2) if of.is_one else Key(name, colour))
        )
    lines = [
        line
        for line in lines
        if _has_curve([line]) or line[2].look != "thin" and any(pieces(line[0], "samples", line[1]))
    ]
    if not _has_curve(lines):
        return
    looks = {"thin": "training", "line": "validation"}
    found = [
        f"{look}: {what}" for look, what in looks.items() if any(key.look == look for _, _, key in lines)
    ]
    note = "" if of.is_one else f"{', '.join(found).replace('line', 'thick').capitalize()}."
    yield _picture(of, LOSSES, lines, note, [key for _, _, key in lines] if of.is_one else [])


def _metric(of: Shown, name: str) -> Iterable[str]:
    lines = [
        (run.of_kind("validation"), name, Key(own, colour))
        for run, own, colour in of.each()
        if _points(run, name)
    ]
    if not _has_curve(lines):
        return
    goals = goals_among(run.targets() for run in of.runs)
    target = read_target(name, goals[name]) if name in goals else None
    note = f"Dashed: the target, {target.in_words()}." if target else ""
    yield _picture(of, name, lines, note, level=target.bound if target else None)


def _throughput(of: Shown) -> Iterable[str]:
    value = "samples_per_second"
    lines = [(run.of_kind("progress"), value, Key(name, colour)) for run, name, colour in of.each()]
    lines = [line for line in lines if len([row for row in line[0] if _is_finite(row.get(value))]) > 2]
    if lines:
        yield _picture(of, "Throughput", lines, "Samples per second, from row to row.")


def _family(of: Shown, family: Family, changes: Mapping[str, float]) -> Iterable[str]:
    """A picture, of one run with a line for each, of several with their means; and a table of all."""
    yield figures(list(_family_picture(of, family, changes)))
    head = ["", *(["first", "last", "change"] if of.is_one else of.names)]
    lines: list[list[Any]] = []
    for name in sorted(family.names, key=lambda one: -changes[one]):
        ends = [[value for _, value in _points(run, name)] for run in of.runs]
        if of.is_one:
            lines.append([name, ends[0][0], ends[0][-1], ends[0][-1] - ends[0][0]])
        else:
            lines.append([name, *(values[-1] if values else "" for values in ends)])
    yield table(head, lines)


def _family_picture(of: Shown, family: Family, changes: Mapping[str, float]) -> Iterable[str]:
    if of.is_one:
        rows, names = of.runs[0].of_kind("validation"), list(family.names)
        few = len(names) <= NUM_COLOURS
        marked = names if few else sorted(names, key=lambda name: -changes[name])[:MOST_MARKED]
        those = [Key(name, number) for number, name in enumerate(marked, 1)]
        rest = [Key(f"the other {len(names) - len(marked)}", NUM_COLOURS, "thin")] * (not few)
        lines = [(rows, name, rest[0]._replace(text=name)) for name in names if name not in marked]
        lines += [(rows, key.text, key) for key in those]
        note = "" if few else "In colour what changed most; the table has all values."
        yield _picture(of, family.pattern, lines, note, those=[*those, *rest])
        return
    lines = []
    for run, name, colour in of.each():
        rows = []
        for row in run.of_kind("validation"):
            values = [value for one in family.names if _is_finite(value := row.get(one))]
            rows.append(row | ({"": sum(values) / len(values)} if values else {}))
        lines.append((rows, "", Key(name, colour)))
    if _has_curve(lines):
        yield _picture(of, f"Mean of {family.pattern}", lines)
