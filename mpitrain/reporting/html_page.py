"""An HTML page that needs no network: its frame, texts, tables and figures.

Invariants: every text is escaped, and only figures are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from mpitrain.system.saying import html_text

LONG = 36  # texts that are longer may be broken anywhere
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: .6rem 0; font-size: .9rem; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #eee; vertical-align: top }
td { font-variant-numeric: tabular-nums; white-space: nowrap }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 20rem }
.figures { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; flex: 1 1 26rem; max-width: 34rem }
figure svg { width: 100%; height: auto } figcaption { font-size: .85rem; color: #555 }
.fail { color: #b00020; font-weight: 600 } .note { color: #555; font-size: .9rem }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def text(value: object) -> str:
    """A value as the text of an element: numbers with six digits, others as JSON."""
    if isinstance(value, float):
        value = f"{value:.6g}"
    elif not isinstance(value, str):
        value = json.dumps(value, default=str)
    return html_text(value)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; without a head, where that is empty."""
    lines = ["<tr>" + "".join(f"<th>{text(one)}</th>" for one in head) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _cell(value: object) -> str:
    escaped = text(value)
    return f'<td class="long">{escaped}</td>' if len(escaped) > LONG else f"<td>{escaped}</td>"


def figure(svg: str, caption: str) -> str:
    """A drawing with what it shows."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"
