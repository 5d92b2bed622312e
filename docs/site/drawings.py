"""Puts the drawings of a page into it, so that they take the colours that the reader has chosen for the page.

A drawing has colours of its own for light and dark, which follow the browser's setting; inside a page `site.css` gives
them, and they follow the switch at its top, too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

OWN = re.compile(
    r'<style>.*?</style>\n?|<rect width="\d+" height="[\d.]+" fill="var\(--paper\)"/>\n?', re.DOTALL
)


class Drawings(SphinxTransform):
    """Turns images that are drawings of ours into the drawings."""

    default_priority = 300

    def apply(self, **kwargs: Any) -> None:
        for node in [*self.document.findall(nodes.image)]:
            path = Path(self.env.srcdir) / posixpath.dirname(self.env.docname) / node["uri"]
            if path.suffix == ".svg" and path.is_file():
                drawn = OWN.sub("", path.read_text(encoding="utf-8"))
                node.replace_self(nodes.raw("", f'<span class="drawn">{drawn}</span>', format="html"))


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_transform(Drawings)
    return {"parallel_read_safe": True}
