"""Pages of source, for links from the documentation to files and folders of the repository.

A link to a file that is no page leads to the file, with colours; one to a folder leads to the list of its files, with
what the first line of each says it is. Only what is linked to becomes a page, and the files directly in such folders.
"""

from __future__ import annotations

import ast
import os
import posixpath
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

PLACE = "source"
LARGEST = 200_000


def page_of(path: str) -> str:
    """The page on which a file or folder of the repository is shown."""
    return posixpath.normpath(f"{PLACE}/{path}")


def relative(target: str, page: str) -> str:
    """How a page's HTML links to that of another."""
    return posixpath.relpath(target + ".html", posixpath.dirname(page) or ".")


def entries(folder: Path) -> list[Path]:
    """What the list of a folder names: its folders, then its files of text."""
    endings = (".py", ".md", ".toml", ".sh", ".sbatch", ".txt", ".j2", ".def", ".jsonl", "")
    found = [
        path
        for path in folder.iterdir()
        if path.name[0] not in "._"
        and (path.is_dir() or path.suffix in endings)
        or path.name == "__init__.py"
    ]
    return sorted(found, key=lambda path: (path.is_file(), path.name))


def summary(path: Path) -> str:
    """The first line of what a file, or a folder's `__init__.py`, says of itself."""
    source = path / "__init__.py" if path.is_dir() else path
    if source.suffix != ".py" or not source.is_file():
        return ""
    return (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def listing(folder: Path, top: Path, page: str, shown: set[str]) -> str:
    """A folder's files as HTML; those that are shown are linked."""
    rows = []
    for path in entries(folder):
        name = escape(path.name + "/" * path.is_dir())
        if (place := path.relative_to(top).as_posix()) in shown:
            name = f'<a href="{escape(relative(page_of(place), page))}">{name}</a>'
        rows.append(f"<tr><td>{name}</td><td>{escape(summary(path))}</td></tr>")
    return f'<div class="table-wrapper"><table class="docutils">{"".join(rows)}</table></div>'


def coloured(path: Path) -> str:
    """A file as HTML."""
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    with path.open(encoding="utf-8") as file:
        text = file.read(LARGEST)
    if path.stat().st_size > LARGEST:
        text += f"\n... ({path.stat().st_size:,} bytes in all)\n"
    return str(highlight(text, lexer, HtmlFormatter(linenos=False)))


class LinksToSources(SphinxTransform):
    """Turns links to files and folders into links to their pages, and keeps which."""

    default_priority = 300

    def apply(self, **kwargs: Any) -> None:
        top = Path(self.env.srcdir)
        for node in [
            *self.document.findall(addnodes.download_reference),
            *self.document.findall(addnodes.pending_xref),
        ]:
            if node.get("reftype") != "myst" or node.get("refdomain"):
                continue
            path = Path(os.path.normpath(top / posixpath.dirname(self.env.docname) / node["reftarget"]))
            if not path.exists() or not path.is_relative_to(top):
                continue  # MyST says so
            place = path.relative_to(top).as_posix()
            linked_sources(self.env).add(place)
            link = relative(page_of(place), self.env.docname)
            node.replace_self(nodes.reference("", "", *node.children, refuri=link, internal=True))


def linked_sources(env: Any) -> set[str]:
    """What pages have linked to so far, seen from the top of the repository."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = set()
    return env.linked_sources  # type: ignore[no-any-return]


def pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Sphinx asks for these when it has written its own."""
    top = Path(app.srcdir)
    shown = set(linked_sources(app.env))
    for place in [*shown]:
        if (top / place).is_dir():
            shown |= {path.relative_to(top).as_posix() for path in entries(top / place) if path.is_file()}
    for place in sorted(shown):
        path, page = top / place, page_of(place)
        body = listing(path, top, page, shown) if path.is_dir() else coloured(path)
        title = place + "/" * path.is_dir()
        yield page, {"title": title, "body": f"<h1>{escape(title)}</h1>{body}"}, "page.html"
    first = relative(app.config.root_doc, "index")
    yield "index", {"title": app.config.project, "first": first}, "first.html"


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_transform(LinksToSources)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
