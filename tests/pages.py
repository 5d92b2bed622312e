"""Runs every command of the README and of `docs/`, as it is printed, in a fresh copy, and keeps what came of it.

    python -m tests.pages [PAGE ...]      (`make pages`)

A page has a copy of its own, with the environment of this one, the digits packed as `make train` packs them, and the
files that the page says one has. Commands run in their order, each once where several pages print it, with one thread
for torch where nothing says otherwise, so that a busy machine does not have it wait for threads. They may end with exit
code 0, or with 3, which says that a run is whole and its target was missed. Those of a block that is marked
(`<!-- needs: Slurm -->`) or a line that is (`# needs Slurm`) are counted and not run; so are those that `RUN_BY` names,
which another command of this repository runs. The table is `tests/pages.txt`, which is committed; `tests/test_pages.py`
holds that it has a row for each command, and runs a sample.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from docs.pages import ROOT
from tests import documented
from tests.documented import Command

TABLE = ROOT / "tests" / "pages.txt"
PAGES = documented.MADE_TO_RUN
LIMIT_S = 3600
NOT_YET = "not run yet"
HEAD = f"{'page':<40} {'seconds':>7}  {'result':<28} command"
# What is run as printed, but not from here: by whom.
RUN_BY = (
    (r"^make (train|test)( ARGS=.*)?$", "hand, in a fresh clone"),
    (r"^(RFM_\S+ reframe|jube) ", "tests/suites"),
)


class Row(NamedTuple):
    """What came of a command; `seconds` is -1 where it was not run."""

    page: str
    command: str
    seconds: float
    result: str

    def __str__(self) -> str:
        took = f"{self.seconds:.1f}" if self.seconds >= 0 else "-"
        return f"{self.page:<40} {took:>7}  {self.result:<28} {self.command}"


def commands(pages: list[Path] = PAGES) -> list[Command]:
    """Every command once, with or without `.venv/bin/`, on the first page that prints it."""
    found: dict[str, Command] = {}
    for page in pages:
        for command in documented.printed(page):
            bare = command.text.replace(".venv/bin/", "")
            if bare not in found or found[bare].needs and not command.needs:
                found[bare] = command
    return list(found.values())


def not_run(command: Command) -> str:
    """Why a command is not run here; empty where it is."""
    if command.needs:
        return f"needs {command.needs}"
    return next((f"by {who}" for pattern, who in RUN_BY if re.search(pattern, command.text)), "")


class Copy(documented.Folder):
    """A copy of what is committed and changed here, in which a page's commands run."""

    def __init__(self, folder: Path, page: Path):
        if page.stem == "ten-minutes":  # which begins in an empty folder
            self._begin(folder)
            for name, text in documented.files_of_newcomers(page).items():
                (folder / name).write_text(text)
            return
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        pack = ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read"]
        packed = subprocess.run(pack, cwd=ROOT, check=True, capture_output=True, input=names.encode()).stdout
        subprocess.run(["tar", "--extract"], cwd=folder, check=True, input=packed)
        super().__init__(folder)

    def time(self, command: Command) -> Row:
        """Runs a command as it is printed."""
        began_s = time.perf_counter()
        try:
            code: int | str = subprocess.run(
                ["bash", "-c", command.text.replace("/local/scratch", str(self.folder / "scratch"))],
                cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1", **self.env}, stdin=subprocess.DEVNULL,
                stdout=(self.folder / "printed.log").open("w"), stderr=subprocess.STDOUT, timeout=LIMIT_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "no end"
        result = {0: "ok", 3: "ok, target missed"}.get(code, f"FAILED: {code}")  # type: ignore[call-overload]
        row = Row(named(command.page), command.text, time.perf_counter() - began_s, result)
        if result.startswith("FAILED"):
            print((self.folder / "printed.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        return row


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def kept() -> dict[tuple[str, str], Row]:
    """The rows of the committed table."""
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[2:] if TABLE.exists() else []:
        page, took, result, command = line[:40].strip(), line[41:48].strip(), line[50:78].strip(), line[79:]
        rows[page, command] = Row(page, command, -1.0 if took == "-" else float(took), result)
    return rows


def write(rows: dict[tuple[str, str], Row]) -> str:
    """Writes the table in the order of the pages, and returns its first line."""
    wanted = []
    for command in commands():
        key = (named(command.page), command.text)
        wanted.append(rows.get(key, Row(*key, -1.0, not_run(command) or NOT_YET)))
    ran = [row for row in wanted if row.seconds >= 0]
    failed = sum(row.result.startswith("FAILED") for row in ran)
    counts: dict[str, int] = {}
    for row in wanted:
        if row.seconds < 0:
            counts[row.result] = counts.get(row.result, 0) + 1
    others = "".join(f", {count} {why}" for why, count in sorted(counts.items()))
    first = f"{len(wanted)} commands: {len(ran)} run, {failed} failed{others}"
    TABLE.write_text("\n".join([first, HEAD, *map(str, wanted)]) + "\n", encoding="utf-8")
    return first


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/jobs.md (default: all)")
    options = parser.parse_args()
    unknown = set(options.pages) - set(map(named, PAGES))
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    rows = kept()
    for page in PAGES:
        mine = [command for command in commands() if command.page == page]
        if not mine or (options.pages and named(page) not in options.pages):
            continue
        with tempfile.TemporaryDirectory(prefix="pages-") as folder:
            copy = Copy(Path(folder), page)
            for command in mine:
                why = not_run(command)
                row = Row(named(page), command.text, -1.0, why) if why else copy.time(command)
                rows[row.page, row.command] = row
                print(row, flush=True)
        write(rows)
    first = write(rows)
    print(first)
    return int(any(row.result.startswith("FAILED") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
