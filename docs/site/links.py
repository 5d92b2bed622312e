"""Every link of a built site leads somewhere, and no page of it asks another machine for anything.

python -m docs.site.links docs/_build/html
"""

from __future__ import annotations

import posixpath
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements whose address a browser asks for by itself; where others lead is the reader's choice.
ASKED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """The names that a page can be entered at, its links, and what it makes a browser ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.asked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value is not None}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if ASKED.get(tag) in found:
            self.asked.append(found[ASKED[tag]])


def faults(site: Path) -> list[str]:
    """What is wrong with the pages of a folder, one line each."""
    pages = {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
    }
    found = []
    for name, page in sorted(pages.items()):
        for link in dict.fromkeys(page.links + page.asked):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.asked and parts.scheme != "data":
                    found.append(f"{name}: asks {parts.netloc} for {link}")
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
                if parts.path
                else name
            )
            if not (site / target).is_file():
                found.append(f"{name}: {link} leads to no file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{name}: {link} leads to no such place on its page")
    return found


def main(arguments: list[str]) -> int:
    """Prints what is wrong; 1 where something is."""
    site = Path(arguments[0])
    found = faults(site)
    print(*found or [f"all links of {len([*site.rglob('*.html')])} pages lead somewhere"], sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
