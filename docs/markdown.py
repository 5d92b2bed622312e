"""Tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def cell(text: str) -> str:
    """Text that a table's cell shows as it is."""
    return " ".join(text.split()).replace("|", "\\|")


def table(*rows: Sequence[str]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def wrapped(text: str, width: int = 118) -> str:
    """The text with long lines of prose broken; tables and blocks of code stay as they are."""
    lines, in_block = [], False
    for line in text.splitlines():
        in_block ^= line.startswith("```")
        if in_block or len(line) <= width or line.startswith(("|", "```")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)
