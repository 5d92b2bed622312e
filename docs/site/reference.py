"""Adds to the page of public names what the docstring of each says."""

from __future__ import annotations

import inspect
import re
from typing import Any

import mpitrain
from docs.api import groups

PAGE = "docs/reference"
WITH_METHODS = ("ShardWriter", "ServedEmbedding", "Shards", "Samples")


def documented(name: str) -> str:
    """What autodoc is told of a name."""
    kind = "class" if inspect.isclass(getattr(mpitrain, name)) else "function"
    members = "   :members:\n" if name in WITH_METHODS else ""
    return f".. auto{kind}:: mpitrain.{name}\n{members}"


def with_docstrings(text: str) -> str:
    """The page with a part behind each of its tables."""
    found = groups()

    def add(part: re.Match[str]) -> str:
        told = "\n".join(documented(name) for name in found[part[1]])
        return f"{part[0].rstrip()}\n\n```{{eval-rst}}\n{told}```\n\n"

    return re.sub(r"^## (.+)\n(?:(?!^## |^<!-- end).*\n)+", add, text, flags=re.MULTILINE)


def as_rst(line: str) -> str:
    """A line of a docstring as Sphinx reads it: what is not between backticks is text as it stands."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # a span that goes on in the next line
        return line
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", parts[at])
        if at and parts[at][:1].isalnum():
            parts[at] = "\\ " + parts[at]
    return "`".join(parts)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("sphinx.ext.napoleon")

    def add(app: Any, name: str, content: list[str]) -> None:
        if name == PAGE:
            content[0] = with_docstrings(content[0])

    def plain(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
        lines[:] = [as_rst(line) for line in lines]

    app.connect("source-read", add)
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon reads them
    return {"parallel_read_safe": True}
