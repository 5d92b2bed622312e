"""Mark rows whose commit is lost, and put aside rows that do not stand for a commit once they have been measured anew.

    python benchmarks/pages/earlier.py [--dry-run]            (a part of `make evidence`)

A row from a tree that was not its commit, or of a commit that is not in the history, moves to `results/earlier`, which
no page reads, when its setting has a later row without such a flaw. Until then it stays where it is. No row is lost:
each is in one of the two files of its program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.measurement import Measurement, declared, program_of

from pages import rows
from pages.freshness import History, why_not


def parted(
    name: str, measurement: Measurement, found: list[rows.Row], history: History
) -> tuple[list[rows.Row], list[rows.Row]]:
    """The rows of a program that stay, those of lost commits marked, and those that have been measured anew."""
    for row in found:
        if history.place(row["commit"].removesuffix("-dirty")) is None:
            row[rows.LOST] = True
        else:
            row.pop(rows.LOST, None)
    moved = set()
    for setting in rows.grouped(name, measurement, found):
        sound = [at for at, row in enumerate(setting.rows) if not rows.flaw(row)]
        moved |= {id(row) for row in setting.rows[: max(sound, default=0)] if rows.flaw(row)}
    return [row for row in found if id(row) not in moved], [row for row in found if id(row) in moved]


def put_aside(history: History, folder: Path, dry_run: bool = False) -> dict[str, tuple[int, int]]:
    """Of each program with rows in the folder: how many moved to `earlier`, and how many with a flaw stay."""
    told = {}
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()]
        stay, moved = parted(path.stem, declared(program_of(path.stem)), found, history)
        told[path.stem] = len(moved), sum(map(bool, map(rows.flaw, stay)))
        made = "".join(json.dumps(row) + "\n" for row in stay)
        if dry_run or made == text:
            continue
        if moved:  # first to where they go: a kill in between leaves them twice, and never nowhere
            (folder / "earlier").mkdir(exist_ok=True)
            with open(folder / "earlier" / path.name, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in moved))
                file.flush()
                os.fsync(file.fileno())
        path.with_suffix(".new").write_text(made, encoding="utf-8")
        path.with_suffix(".new").replace(path)
    rows.forget()
    return told


def main() -> int:
    """Say what moves, and what stays with a mark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="move and mark nothing")
    options = parser.parse_args()
    if reason := why_not():
        print(f"refused: {reason}, where no commit can be looked up", file=sys.stderr)
        return 2
    told = put_aside(History(), rows.RESULTS, options.dry_run)
    for name, (moved, stay) in told.items():
        if moved or stay:
            print(f"{name}: {moved} rows moved to earlier/, {stay} stay until they have been measured anew")
    print(f"{sum(moved for moved, _ in told.values())} rows moved", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
