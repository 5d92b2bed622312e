"""Record everything that the pages show anew, the oldest first, in pieces that can be interrupted and continued.

    python benchmarks/pages/evidence.py [--dry-run] [--minutes M] [--only NAME ...]      (`make evidence`)
        [--commits 200] [--under-load] [--wait-minutes 10]

Invariants: the state is the rows themselves. A command is due while a setting that it measures has no row, or shows one
that `freshness.py` calls stale or, without `--under-load`, one that was taken under load; what has been recorded is not
run again, whoever stopped the run before. Before each command the tree has to be its commit and the machine quiet; and
one run at a time records on a machine, whatever checkout it belongs to: two would measure each other. A command that
fails is named, and the next one runs. At the end rows that have been measured anew move to `results/earlier`, the pages
are made anew, and each figure that changed is printed beside what it was. What takes hours, root or a GPU (`campaign`
of a program) is listed, and never run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import BUSY, COMMAND, changed_files, head
from measuring.measurement import ROOT, Command, declared, program_of

from pages import earlier, freshness, rows

Figures = dict[tuple[str, str, str], tuple[float | None, float, float]]
LOCK = Path(tempfile.gettempdir()) / f"mpitrain-evidence-{os.getuid()}.lock"


@dataclass(frozen=True)
class Piece:
    """One command, and why it is to be run.

    Attributes:
        name: of the program whose rows it writes.
        age: commits that touched what the oldest of its rows rests on; infinite where that row does not stand.
        why: the reason, or empty if nothing is to be done.
        estimated_s: what it took when it last recorded rows, or what it declares.
    """

    name: str
    command: Command
    age: float
    why: str
    estimated_s: float


def pieces(names: Iterable[str], history: freshness.History, most: int, under_load: bool) -> list[Piece]:
    """The commands of these programs, those whose rows are oldest first."""
    found = []
    for name in names:
        for command in declared(program_of(name)).commands:
            written = command.writes or name
            settings = [one for one in rows.settings_of(written) if command.measures(one.values)]
            judged = [judge(one, history, most, under_load) for one in settings] or [(math.inf, "no row")]
            age, why = max(judged, key=lambda one: (bool(one[1]), one[0]))
            found.append(Piece(written, command, age, why, estimate(command, settings)))
    return sorted(found, key=lambda piece: (-bool(piece.why), -piece.age))


def judge(
    setting: rows.Setting, history: freshness.History, most: int, under_load: bool
) -> tuple[float, str]:
    """How old what is shown of a setting is, and why it has to be measured anew, if so."""
    if why := rows.flaw(setting.row):
        return math.inf, why
    age = history.since(setting.name, setting.row["commit"])
    if age is None:
        return math.inf, "of a commit that is not in the history"
    if age > most:
        return age, f"{age} commits old that touched what it depends on"
    return age, "taken under load" if setting.row.get("under_load") and not under_load else ""


def estimate(command: Command, settings: Sequence[rows.Setting]) -> float:
    """Seconds that the command took when it last ran to its last row, or that it declares."""
    taken = [
        row["wall_s"] for one in settings for row in one.rows
        if row.get("launched_as") == command.line and "wall_s" in row
    ]  # fmt: skip
    return max(taken[-len(settings) :]) if taken else 60 * command.minutes


def shown_figures(names: Iterable[str]) -> Figures:
    """What is shown of every figure, and its range over all rows."""
    return {
        (name, setting.title, label): (value, low, high)
        for name in names
        for setting in rows.settings_of(name)
        for label, value, low, high, _ in setting.ranges()
    }


def changes(before: Figures, after: Figures) -> list[str]:
    """A line for each figure that is another one now; marked where it lies outside of what was seen before."""
    lines = []
    for key, (new, _, _) in after.items():
        old, low, high = before.get(key, (None, math.inf, -math.inf))
        if new is not None and new != old:
            was = "none" if old is None else rows.number_text(old)
            out = old is not None and not low <= new <= high
            mark = f", outside of {rows.number_text(low)} to {rows.number_text(high)}" if out else ""
            lines.append(
                f"{' | '.join(filter(None, key))}: {was} -> {rows.number_text(new)}{mark}"
            )  # fmt: skip
    return lines


def quiet(wait_s: float, load: Callable[[], float], sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether the load fell below what marks a row, within this time."""
    limit, step_s = BUSY * len(os.sched_getaffinity(0)), 5.0
    while load() > limit:
        if wait_s <= 0:
            return False
        sleep(step_s)
        wait_s -= step_s
    return True


def run(command: Command) -> int:
    """Run a command as it is typed, recording; its exit code, 130 if it was interrupted."""
    words = shlex.split(command.line)
    binaries = Path(sys.executable).parent
    env = {
        **os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}", COMMAND: command.line,
    }  # fmt: skip
    return subprocess.run([*words, "--record"], cwd=ROOT, env=env, check=False).returncode


def table_of(found: Sequence[Piece]) -> str:
    """What is to be done, in its order."""
    due = [piece for piece in found if piece.why]
    lines = [f"{piece.estimated_s / 60:6.1f} min  {piece.command.line}\n            {piece.name}: {piece.why}"
             for piece in due]  # fmt: skip
    lines.append(f"{sum(piece.estimated_s for piece in due) / 60:6.1f} min  in all, of {len(due)} commands; "
                 f"{len(found) - len(due)} are fresh")  # fmt: skip
    return "\n".join(lines)


def campaigns(names: Iterable[str]) -> str:
    """What is not part of this."""
    lines = [
        f"  {name}: {'; '.join(told)}" for name in names if (told := declared(program_of(name)).campaign)
    ]
    return "\n".join(["Campaigns, which are run on their own:", *lines]) if lines else ""


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Whether no other run records while this block does; `path`: of the file that stands for the machine."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def record(found: Sequence[Piece], minutes: float, wait_s: float, under_load: bool) -> list[str]:
    """Run what is due within a budget, alone on the machine; what went wrong."""
    with alone(LOCK) as is_alone:
        if not is_alone:
            return [f"another run records on this machine (it holds {LOCK}): wait for its end"]
        return record_due(found, minutes, wait_s, under_load)


def record_due(found: Sequence[Piece], minutes: float, wait_s: float, under_load: bool) -> list[str]:
    """As `record`."""
    ends_s, wrong = time.monotonic() + 60 * minutes, []
    for piece in [piece for piece in found if piece.why]:
        line = piece.command.line
        if time.monotonic() + piece.estimated_s > ends_s:
            print(f"left for later, it takes {piece.estimated_s / 60:.0f} minutes: {line}", flush=True)
            continue
        if changed := changed_files():
            return [*wrong, f"stopped before {line}: {', '.join(changed[:3])} differ from commit {head()}"]
        if not under_load and not quiet(wait_s, lambda: os.getloadavg()[0]):
            busy = f"stopped before {line}: the machine is loaded ({os.getloadavg()[0]:.1f}); go on later, or with "
            return [*wrong, f"{busy}--under-load, which marks the rows"]
        print(f"\n== {line}", flush=True)
        written = rows.RESULTS / f"{piece.name}.jsonl"
        before = written.stat().st_size if written.exists() else 0
        try:
            code = run(piece.command)
        except KeyboardInterrupt:
            return [*wrong, f"interrupted during {line}: what it has recorded stands, and is not run again"]
        except OSError as error:
            wrong.append(f"{piece.name}: {line}: {error}")
            continue
        grown = written.exists() and written.stat().st_size > before
        if code or not grown:
            wrong.append(f"{piece.name}: {line}: exit code {code}, {'some' if grown else 'no'} rows")
    return wrong


def main() -> int:
    """Record what is due, put aside what it replaces, make the pages, and say what changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would run and how long, and run nothing"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start nothing that takes longer than is left"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs")
    parser.add_argument(
        "--commits", type=int, default=freshness.MOST_COMMITS, help="a row is due from more than these"
    )
    parser.add_argument(
        "--under-load", action="store_true", help="record on a loaded machine, and mark the rows"
    )
    parser.add_argument(
        "--wait-minutes", type=float, default=10, help="for the load to fall, before it is given up"
    )
    options = parser.parse_args()
    if reason := freshness.why_not():
        print(f"refused: {reason}, where no commit can be looked up", file=sys.stderr)
        return 2
    names = list(freshness.report.PROGRAMS)
    if unknown := sorted(set(options.only or ()) - set(names)):
        print(
            f"--only: no program is called {', '.join(unknown)}; there are {', '.join(names)}",
            file=sys.stderr,
        )
        return 2
    history = freshness.History()
    found = pieces(options.only or names, history, options.commits, options.under_load)
    print(table_of(found), campaigns(names), sep="\n", flush=True)
    if options.dry_run:
        return 0
    if changed := changed_files():
        print(
            f"refused: {', '.join(changed[:3])} differ from commit {head()}: commit or restore them",
            file=sys.stderr,
        )
        return 2
    written = list(dict.fromkeys(piece.name for piece in found))
    before = shown_figures(written)
    wrong = record(found, options.minutes, 60 * options.wait_minutes, options.under_load)
    rows.forget()
    print("\nFigures that changed:", *(changes(before, shown_figures(written)) or ["none"]), sep="\n")
    for name, (moved, _) in earlier.put_aside(history, rows.RESULTS).items():
        if moved:
            print(f"{name}: {moved} rows moved to earlier/")
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py")], cwd=ROOT, check=False
    ).returncode
    print(*(f"FAILED {text}" for text in wrong), sep="\n", end="\n" if wrong else "", flush=True)
    return int(bool(wrong) or bool(made))


if __name__ == "__main__":
    sys.exit(main())
