"""The recorded rows, and figures of them as text, for the pages that are made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from measuring.measurement import ROOT

Row = dict[str, Any]
_shown: list[tuple[str, Row | None]] = []


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """All recorded rows of a program, the oldest first."""
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    return tuple(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()


def shown_by(make: Callable[[], Any]) -> list[tuple[str, Row | None]]:
    """Programs and rows that a part of a page shows when it is made; no row where a program has none."""
    _shown.clear()
    make()
    return list(_shown)


def shown(name: str, *rows: Row | None) -> None:
    """Note that these rows of a program are shown; `newest` and `one` do that for theirs."""
    _shown.extend((name, row) for row in rows)


def newest(name: str, *keys: str, **wanted: Any) -> dict[tuple[Any, ...], Row]:
    """The newest row for each combination of these keys, of rows with the wanted values."""
    rows = [row for row in rows_of(name) if all(row.get(key) == value for key, value in wanted.items())]
    found = {tuple(row.get(key) for key in keys): row for row in rows}
    shown(name, *found.values())
    return found


def one(name: str, **wanted: Any) -> Row:
    """The newest row with these values."""
    return newest(name, **wanted)[()]


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
    """Where and when rows were measured, a line for each of them."""
    lines = []
    for row in rows:
        mpi = row.get("mpi", "").split(",")[0]
        rounds = f"{row['rounds']} rounds" if isinstance(row.get("rounds"), int) else ""
        busy = "under load" if row.get("under_load") else ""
        words = [row["cpu"], f"{row['num_cores']} cores", f"torch {row.get('torch', '?')}", mpi, rounds, busy]
        line = f"{row['date']}, commit {row['commit']}, {', '.join(filter(None, words))}"
        if line not in lines:
            lines.append(line)
    return "\n".join(f"- {line}" for line in lines)
