"""Bits that flip in what replicas hold alike, and on the way between them: how many are found, and what comes of it.

    python -m tests.flips.campaign [--minutes 60] [--only N]        (`make flips`)

Each case (`draw.py`) is a small run on two ranks in which one bit flips: of a random tensor of the parameters or of the
optimizer's state, or of a random message, at a random step on a random rank. It is

    found       all ranks went back once, by no more steps than one comparison is from the next, and the run ended in
                the bits of an undisturbed one
    vanished    nobody saw it, and nothing is lost: the run ended in the bits of an undisturbed one
    ended       the run ended with an error that says why
    missed      anything else; of payloads without checksums, that is what they are for

Rows are appended to `found.jsonl`, and a campaign goes on after the last of them. Exit code 1 where one of a kind that
must be found was missed in more than a hundredth of its cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.flips.draw import KINDS, RANKS, draw
from tests.ranks import ROOT, find_mpi, run_ranks

FOUND = Path(__file__).parent / "found.jsonl"
MUST_BE_FOUND = KINDS[:3]
BLOCK = 24  # cases of a launch
BLOCK_S = 600.0


def verdict(row: dict[str, Any]) -> str:
    """What became of the flip, of a row that `program.py` prints."""
    if row["error"]:
        return "ended"
    within = 0 <= row["redone_steps"] <= row["options"]["compare_every"]
    if row["times"] == 1 and within and row["same"]:
        return "found"
    return "vanished" if row["times"] == 0 and row["same"] else "missed"


def play(numbers: range, folder: Path) -> list[dict[str, Any]]:
    """Rows of these cases, from one launch; of one that ends it as the last, and no more."""
    python = str(find_mpi("own")[0])
    program = str(ROOT / "tests" / "flips" / "program.py")
    cases = json.dumps([draw(number) for number in numbers])
    ended = run_ranks(RANKS, [python, program, str(folder), cases], timeout_s=BLOCK_S)
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if len(rows) < len(numbers):
        last = draw(numbers[len(rows)])
        why = next(
            (line for line in ended.stderr.splitlines() if "mpitrain: rank" in line), ended.stderr[-500:]
        )
        rows.append({**last._asdict(), "times": 0, "redone_steps": 0, "same": False, "error": why})
    return [{**row, "verdict": verdict(row)} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """How many of each kind came to what."""
    lines = []
    for kind in KINDS:
        counts = Counter(row["verdict"] for row in rows if row["kind"] == kind)
        came = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        lines.append(f"{kind}: {counts.total()} flips: {came or 'none'}")
    return "\n".join(lines)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The kinds of which more than a hundredth was missed."""
    found = []
    for kind in MUST_BE_FOUND:
        counts = Counter(row["verdict"] for row in rows if row["kind"] == kind)
        if 100 * counts["missed"] > counts.total():
            found.append(kind)
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no launch after so many")
    parser.add_argument("--only", type=int, help="this case alone, which is not recorded")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only is not None:
            rows = play(range(options.only, options.only + 1), Path(folder))
            print(json.dumps(rows[0], indent=1))
            return int(rows[0]["verdict"] == "missed")
        rows = [json.loads(line) for line in FOUND.read_text().splitlines()] if FOUND.exists() else []
        ends_s = time.monotonic() + 60 * options.minutes
        while time.monotonic() < ends_s:
            first = max((row["number"] + 1 for row in rows), default=0)
            new = play(range(first, first + BLOCK), Path(folder) / str(first))
            with FOUND.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
            rows += new
            print(f"cases {first} to {new[-1]['number']}\n{table(rows)}", flush=True)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
