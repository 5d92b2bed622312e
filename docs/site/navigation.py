"""What stands beside every page, from the lists of links that people read.

The first page has a heading for each thing that one may want and links below it: each becomes a part of the navigation.
A page that has a folder of its own name, such as `strategies.md`, is the parent of the pages there that it links to.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"^(?:- |\| )?\[[^\]]+\]\(([^)#\s]+)\.md\)", re.MULTILINE)
TREE = "\n\n```{{toctree}}\n:hidden:\n{caption}\n{pages}\n```\n"


def tree(pages: list[str], caption: str = "") -> str:
    """A toctree as MyST reads it; its pages are seen from the top of the repository."""
    said = f":caption: {caption}\n" if caption else ""
    return TREE.format(caption=said, pages="\n".join(f"/{page}" for page in pages))


def linked(text: str, folder: str) -> list[str]:
    """The pages that lines of a text begin with, each once, without their ending."""
    found = (posixpath.normpath(posixpath.join(folder, page)) for page in LINK.findall(text))
    return list(dict.fromkeys(found))


def trees(name: str, text: str, first: str) -> str:
    """The toctrees of a page; empty for most."""
    folder = posixpath.dirname(name)
    if name == first:
        parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
        return "".join(tree(linked(part, folder), head) for head, part in zip(parts[::2], parts[1::2]))
    below = [page for page in linked(text, folder) if page.startswith(name + "/")]
    return tree(below) if below else ""


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""

    def add(app: Any, name: str, content: list[str]) -> None:
        content[0] += trees(name, content[0], app.config.root_doc)

    app.connect("source-read", add)
    return {"parallel_read_safe": True}
