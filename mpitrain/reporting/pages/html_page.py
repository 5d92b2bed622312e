"""An HTML page that needs no network: its frame, texts, numbers, tables and figures.

Invariants: every text is escaped, and only figures are taken as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from mpitrain.reporting.pages.look import POLICY, SCRIPT, STYLE, within_colours
from mpitrain.system.saying import html_text

SWITCH = (
    '<div class="switch" role="radiogroup" aria-label="what curves are drawn against">'
    '<label><input type="radio" name="against" id="by-samples" checked> by samples</label>'
    '<label><input type="radio" name="against" id="by-time"> by time</label></div>'
)
LONG = 36  # texts that are longer may be broken anywhere


class Key(NamedTuple):
    """What a line or an area of a figure is: a text, the number of its colour, and "line", "thin", "dashed", "dotted"
    or "area"."""

    text: str
    colour: int
    look: str = "line"


def document(title: str, body: Iterable[str], reload_s: float = 0) -> str:
    """The whole page; with `reload_s` one that loads itself again after so many seconds."""
    live = f' data-reload="{reload_s:g}" data-written="{time.time():.0f}"' if reload_s else ""
    old = '<p id="old" class="fail live" hidden>Nobody writes this page any more: it shows how things stood.</p>'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{html_text(POLICY)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body{live}>\n"
        + (old if reload_s else "")
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def text(value: object) -> str:
    """A value as the text of an element: numbers with six digits, others as JSON."""
    if isinstance(value, float):
        value = f"{value:.6g}"
    elif not isinstance(value, str):
        value = json.dumps(value, default=str)
    return html_text(value)


def paragraphs(sentences: Iterable[str], kind: str = "") -> Iterable[str]:
    """Each sentence in a paragraph of its own."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    for one in sentences:
        yield f"{opening}{text(one)}</p>"


def head(title: str, status: str, kind: str, about: Sequence[str] = ()) -> str:
    """The name of the page with how it stands; `kind`: "good", "warn", "bad" or "info"; `about`: short facts."""
    facts = "".join(paragraphs([" · ".join(about)] if about else [], "note"))
    return f'<div class="head"><h1>{text(title)}</h1><span class="status {kind}">{text(status)}</span></div>{facts}'


def tiles(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: what each is, the number, and a remark."""
    found = (
        f'<div class="tile"><small>{text(name)}</small><b>{text(number)}</b><small>{text(remark)}</small></div>'
        for name, number, remark in numbers
    )
    return f'<div class="tiles">{"".join(found)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], best: Collection[int] = ()) -> str:
    """A table; without a head, where that is empty; with one it can be sorted. Columns of numbers stand at the right.

    Args:
        best: indices of the rows that are marked.
    """
    lines = [list(row) for row in rows]
    is_number = [
        any(_is_number(row[at]) for row in lines) and all(row[at] in ("", None) or _is_number(row[at]) for row in lines)
        for at in range(len(lines[0]) if lines else 0)
    ] if head else []  # fmt: skip
    titles = [
        f"<th{_class(at, is_number)}>{f'<button>{text(one)}</button>' if one and len(lines) > 1 else text(one)}</th>"
        for at, one in enumerate(head)
    ]
    body = [
        ('<tr class="best">' if number in best else "<tr>")
        + "".join(_cell(value, _class(at, is_number)) for at, value in enumerate(row))
        + "</tr>"
        for number, row in enumerate(lines)
    ]
    first = f"<thead><tr>{''.join(titles)}</tr></thead>" if head else ""
    return f'<div class="table"><table>{first}<tbody>{"".join(body)}</tbody></table></div>'


def used_columns(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    """The table without the columns in which nothing stands."""
    used = [at for at in range(len(titles)) if any(row[at] not in ("", None) for row in rows)]
    return [titles[at] for at in used], [[row[at] for at in used] for row in rows]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Number) and not isinstance(value, bool)


class Number(NamedTuple):
    """A number of a table as people read it, sorted by its value."""

    value: float
    text: str


def _class(at: int, is_number: Sequence[bool]) -> str:
    return ' class="num"' if at < len(is_number) and is_number[at] else ""


def _cell(value: object, kind: str) -> str:
    if isinstance(value, Number):
        return f'<td{kind} data-value="{value.value:.12g}">{text(value.text)}</td>'
    escaped = text("" if value is None else value)
    return f'<td class="long">{escaped}</td>' if len(escaped) > LONG else f"<td{kind}>{escaped}</td>"


def keys(those: Iterable[Key]) -> str:
    """What the colours of figures stand for."""
    found = (
        f'<li><i class="{one.look}" style="color: var(--c{within_colours(one.colour)})"></i>{text(one.text)}</li>'
        for one in those
    )
    return f'<ul class="keys">{"".join(found)}</ul>'


def figure(svgs: str, title: str, note: str = "", those: Sequence[Key] = ()) -> str:
    """A drawing, or several of which one is shown, with what it shows."""
    remark = f'<br><span class="note">{text(note)}</span>' if note else ""
    return f"<figure><figcaption><b>{text(title)}</b>{remark}{keys(those) if those else ''}</figcaption>{svgs}</figure>"


def figures(those: Sequence[str]) -> str:
    """Drawings beside one another."""
    return f'<div class="figures">{"".join(those)}</div>' if those else ""


def folded(title: str, body: str) -> str:
    """What is shown on demand."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"
