"""Writes the parts of the documentation that are made from something else.

    python docs/generate.py           write them (`make docs`)
    python docs/generate.py --check   write nothing; exit with 1 and the names of pages that are out of date

Tables of strategies, dampings, codecs and schedules are made from docstrings, figures from `benchmarks/results`, lists
of imports from the source. Each stands between `<!-- generated: NAME -->` and `<!-- end -->`. The pictures of
`docs/pictures` are drawn from `docs/families.py` and from runs in virtual time (`docs/characters.py`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from pages import report  # noqa: E402

from docs import api, family_pictures, features, floors, markdown, value_tables  # noqa: E402
from tests import documented  # noqa: E402

SECTIONS: dict[str, Callable[[], str]] = {
    **value_tables.SECTIONS,
    **report.SECTIONS,
    **floors.SECTIONS,
    **features.SECTIONS,
    **api.SECTIONS,
    "commands": lambda: tested_commands(),
}
MARKED = re.compile(r"(<!-- generated: ([\w ]+) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)


def tested_commands() -> str:
    """The commands of the pages that `make pages` leaves alone, and what the tests do with them."""
    rows = ((f"`{markdown.cell(command)}`", why) for command, why in documented.elsewhere())
    return markdown.table(("command", "what the tests do"), *rows)


def filled(text: str) -> str:
    """A page with its generated parts made anew."""

    def fill(part: re.Match[str]) -> str:
        if part[2] not in SECTIONS:
            raise SystemExit(f"no generated part is called {part[2]!r}; there are {', '.join(SECTIONS)}")
        return f"{part[1]}{markdown.wrapped(SECTIONS[part[2]]())}\n{part[3]}"

    return MARKED.sub(fill, text)


def main(arguments: list[str]) -> int:
    """Write what is out of date, or name it."""
    stale = []
    for page in documented.PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                page.write_text(made, encoding="utf-8")
    for path, made in family_pictures.made().items():
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                path.write_text(made, encoding="utf-8")
    if stale:
        print(
            ("out of date, run `make docs`: " if "--check" in arguments else "written: ") + ", ".join(stale)
        )
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
