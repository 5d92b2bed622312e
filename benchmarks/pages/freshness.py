"""Which rows the figures of the documentation rest on, and whether those rows still stand for what the package does.

    python benchmarks/pages/freshness.py            (`make evidence-check`)

Invariants: which page shows which row is what its making asked for (`rows.shown_by`), and is written down nowhere. A
row is stale if its tree was not its commit, if that commit is not in the history, or if more than `MOST_COMMITS` since
then touched what its program depends on; a page is stale, too, where it has no row to show.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import git
from measuring.measurement import declared, program_of

from docs.pages import PAGES, ROOT
from pages import report, rows

MOST_COMMITS = 200
MARK = re.compile(r"<!-- generated: ([\w ]+) -->")


def why_not() -> str:
    """Why nothing can be said of rows here, if so."""
    if not git("rev-parse", "--git-dir"):
        return "not a git checkout"
    return "a shallow clone" if git("rev-parse", "--is-shallow-repository") == "true" else ""


class History:
    """The commits that lead here, the newest first, with the files that each touched."""

    def __init__(self) -> None:
        told = git("log", "--format=%x00%H", "--name-only", "HEAD").split("\0")[1:]
        self.commits = [(lines[0], lines[2:]) for lines in (part.strip().split("\n") for part in told)]
        self._known: dict[tuple[str, str], str] = {}

    def stale(self, name: str, row: rows.Row) -> str:
        """Why a row of a program no longer stands for it; empty if it does."""
        commit = row["commit"]
        if why := rows.flaw(row):
            return why
        if (commit, name) not in self._known:
            num = self.since(name, commit)
            self._known[commit, name] = (
                f"of commit {commit}, which is not in the history" if num is None
                else f"{num} commits old that touched what it depends on" if num > MOST_COMMITS else ""
            )  # fmt: skip
        return self._known[commit, name]

    def place(self, commit: str) -> int | None:
        """How many commits came after this one; None if it is not in the history."""
        places = (at for at, (one, _) in enumerate(self.commits) if one.startswith(commit.split("-g")[-1]))
        return next(places, None)

    def since(self, name: str, commit: str) -> int | None:
        """How many commits after this one touched what a program depends on; None if it is not in the history."""
        place = self.place(commit)
        if place is None:
            return None
        measurement = declared(program_of(name))
        own = program_of(name).relative_to(ROOT).as_posix()
        return sum(
            any(path == own or measurement.covers(Path(path)) for path in paths)
            for _, paths in self.commits[:place]
        )


def used() -> Iterator[tuple[str, str, rows.Setting | None]]:
    """Page, program and setting of all that is shown; None where a page has no row to show."""
    for page in PAGES:
        for section in MARK.findall(page.read_text(encoding="utf-8")):
            for name, setting in (
                rows.shown_by(report.SECTIONS[section]) if section in report.SECTIONS else ()
            ):
                yield page.relative_to(ROOT).as_posix(), name, setting


def problems() -> list[tuple[str, str]]:
    """Page, and what is wrong with a row that it shows."""
    history, found = History(), []
    for page, name, setting in used():
        if setting is None:
            found.append((page, f"{name}: no row has been recorded"))
        elif why := history.stale(name, setting.row):
            found.append((page, f"{name} of {setting.row['date']}: {why}"))
    return list(dict.fromkeys(found))


def main() -> int:
    """Name the stale rows of each page, the pages that people read first in full."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    found = problems()
    for page, text in found:
        print(f"{page}: {text}")
    for page, num in Counter(page for page, _ in found).items():
        print(f"{num} stale rows behind {page}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
