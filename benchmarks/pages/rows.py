"""The recorded rows by setting, and figures of them as text, for the pages that are made from them.

Invariants: what makes up a setting is declared by the program that measures it (`keys`), and no row of it is left
out: a page shows the newest row whose tree was its commit, and says how many rows there are, what their figures
range over, and on which processors they were measured. A row of another tree, or of a commit that is lost, is shown
only while its setting has no better one, and is marked. `results/earlier` is read by no page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from measuring.measurement import ROOT, Measurement, declared, program_of

Row = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
LOST = "commit_lost"  # the entry of a row whose commit was found missing from the history
_shown: list[tuple[str, Setting | None]] = []


@dataclass(frozen=True, eq=False)
class Setting:
    """All rows of a program that measured the same.

    Attributes:
        name: of the program's rows.
        values: of the keys that it declares.
        rows: the oldest first, at least one.
    """

    name: str
    values: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def row(self) -> Row:
        """The one that is shown."""
        return ([row for row in self.rows if not flaw(row)] or self.rows)[-1]

    @property
    def title(self) -> str:
        """Its values as text."""
        return ", ".join(f"{key} {value}" for key, value in self.values.items() if value not in (None, ""))

    def ranges(self) -> Iterator[tuple[str, float | None, float, float, int]]:
        """Each declared figure: what is shown, the lowest, the highest, and how many rows have it."""
        for path in declared(program_of(self.name)).figures:
            of_rows = [dict(figures(row, path)) for row in self.rows]
            for label in dict.fromkeys(label for found in of_rows for label in found):
                values = [found[label] for found in of_rows if label in found]
                yield (
                    label, dict(figures(self.row, path)).get(label), min(values), max(values), len(values)
                )  # fmt: skip


def flaw(row: Row) -> str:
    """Why a row does not stand for the commit that it names; empty if it does."""
    if row["commit"].endswith("-dirty"):
        return "from a tree that was not its commit"
    return "of a commit that is not in the history" if row.get(LOST) else ""


def figures(row: Any, path: str) -> Iterator[tuple[str, float]]:
    """What a path of `Measurement.figures` leads to in a row: the names on the way there, and the number."""
    mean, _, words = path.rpartition(" ")
    for names, value in _entries(row, words.split(".")):
        if isinstance(value, list) and value:
            value = statistics.mean(value) if mean else value[0]
        if isinstance(value, (int, float)):
            yield " ".join(names), float(value)


def _entries(found: Any, words: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not words:
        yield (), found
    elif words[0] != "*":
        if isinstance(found, dict) and words[0] in found:
            for label, value in _entries(found[words[0]], words[1:]):
                yield (words[0], *label), value
    else:
        pairs = found.items() if isinstance(found, dict) else ((_label(one), one) for one in found or ())
        for name, inner in pairs:
            for label, value in _entries(inner, words[1:]):
                yield (name, *label), value


def _label(entry: Row) -> str:
    """What tells an entry of a list from the others: its texts, whole numbers and yes or no."""
    words = (f"{key} {value}" if isinstance(value, int) else value for key, value in entry.items())
    return " ".join(word for word in words if isinstance(word, str))


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """All recorded rows of a program, the oldest first."""
    path = RESULTS / f"{name}.jsonl"
    return tuple(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()


@cache
def settings_of(name: str) -> tuple[Setting, ...]:
    """All settings of which a program has rows, in the order of their first ones."""
    return grouped(name, declared(program_of(name)), rows_of(name))


def grouped(name: str, measurement: Measurement, rows: Sequence[Row]) -> tuple[Setting, ...]:
    """Rows of a program by the values of its keys."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(measurement.values(row).values()), []).append(row)
    return tuple(Setting(name, measurement.values(same[0]), tuple(same)) for same in found.values())


def forget() -> None:
    """Read all rows anew: the files have changed."""
    rows_of.cache_clear()
    settings_of.cache_clear()


def shown_by(make: Callable[[], Any]) -> list[tuple[str, Setting | None]]:
    """Programs and settings that a part of a page shows when it is made; None where a program has no row."""
    _shown.clear()
    make()
    return list(_shown)


def shown(name: str, *settings: Setting | None) -> None:
    """Note that these settings of a program are shown; `newest` and `one` do that for theirs."""
    _shown.extend((name, setting) for setting in settings)


def newest(name: str, *keys: str, **wanted: Any) -> dict[tuple[Any, ...], Row]:
    """The row to show of each setting with the wanted values, by these values of its row."""
    found: dict[tuple[Any, ...], Row] = {}
    for setting in settings_of(name):
        entries = {**setting.row, **setting.values}
        if all(entries.get(key) == value for key, value in wanted.items()):
            at = tuple(entries.get(key) for key in keys)
            assert at not in found, f"{name}: {keys} do not tell {setting.values} from another setting"
            found[at] = setting.row
            shown(name, setting)
    return found


def one(name: str, **wanted: Any) -> Row:
    """The row to show of the one setting with these values."""
    return newest(name, **wanted)[()]


def all_rows(name: str) -> str:
    """What the rows of settings that were measured more than once range over; empty where none was."""
    body = []
    for setting in settings_of(name):
        if len(setting.rows) > 1:
            for label, value, low, high, number in setting.ranges():
                body.append(
                    (setting.title, label, "" if value is None else number_text(value), number_text(low),
                     number_text(high), str(number))
                )  # fmt: skip
    if not body:
        return ""
    from docs.markdown import table  # campaigns that only read rows do not have it on their path

    head = ("setting", "figure", "shown", "lowest", "highest", "rows")
    told = "All rows of settings that were measured more than once"
    return f"<details><summary>{told}</summary>\n\n{table(head, *body)}\n\n</details>"


def number_text(value: float) -> str:
    """A figure with three digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.5f}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """A ratio with its 95 % interval."""
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} - {high})"


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(us: float) -> str:
    """Microseconds in the unit that fits."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us:.3g} us"


def origin(*rows: Row) -> str:
    """Where and when rows were measured, and how many others there are of their settings, a line for each of them."""
    lines = []
    settings = {id(setting.row): setting for name, setting in _shown if setting}
    for row in rows:
        mpi = row.get("mpi", "").split(",")[0]
        rounds = f"{row['rounds']} rounds" if isinstance(row.get("rounds"), int) else ""
        busy = "under load" if row.get("under_load") else ""
        words = [
            row["cpu"], f"{row['num_cores']} cores", f"torch {row.get('torch', '?')}", mpi, rounds, busy, flaw(row),
            _others(settings[id(row)]) if id(row) in settings else "",
        ]  # fmt: skip
        line = f"{row['date']}, commit {row['commit']}, {', '.join(filter(None, words))}"
        if line not in lines:
            lines.append(line)
    return "\n".join(f"- {line}" for line in lines)


def _others(setting: Setting) -> str:
    processors = " and ".join(dict.fromkeys(row["cpu"] for row in setting.rows))
    return f"of {len(setting.rows)} rows on {processors}" if len(setting.rows) > 1 else ""
