"""`metrics.csv`: the rows of progress, validations, checkpoints and the end as one table.

Invariants: the columns are those of all rows so far; one that comes up later is added at the right, and the file
written anew. Every row is in the file before training goes on.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from mpitrain.system.files.atomic import write_whole
from mpitrain.system.saying import csv_cell

_LOGGED = ("progress", "validation", "checkpoint", "end")


class CsvLog:
    """The table of one run.

    Args:
        path: of the file. One that is there goes on, without the rows beyond `resumed_at` accepted samples (all stay
            where that is None); where the run begins, it is kept under another name.
    """

    def __init__(self, path: Path, resumed_at: int | None):
        self.path, self.place = path, path.name
        self.columns: list[str] = []
        if path.exists() and resumed_at == 0:
            _set_aside(path)
        if path.exists():
            rows = self._read()
            self._rewrite([row for row in rows if resumed_at is None or _samples(row) <= resumed_at])
        self._file = self._open()

    def _open(self) -> TextIO:
        return self.path.open("a", newline="", encoding="utf-8")

    def _read(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="", restkey="")
            self.columns = list(reader.fieldnames or ())
            return [{name: row[name] for name in self.columns} for row in reader]

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        header = dict(zip(self.columns, self.columns, strict=True))
        write_whole(self.path, _text(self.columns, [header, *rows] if header else []), tag=str(os.getpid()))

    def row(self, row: Mapping[str, object]) -> None:
        """Append the row, if it is one of those that a table holds."""
        if row["event"] not in _LOGGED:
            return
        cells = {str(csv_cell(name)): _cell(value) for name, value in row.items()}
        if any(name not in self.columns for name in cells):
            self._file.close()
            rows = self._read()
            self.columns += [name for name in cells if name not in self.columns]
            self._rewrite(rows)
            self._file = self._open()
        self._file.write(_text(self.columns, [cells]))
        self._file.flush()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def _text(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    out = io.StringIO()
    csv.DictWriter(out, columns, restval="", lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cell(value: object) -> str:
    return "" if value is None else str(csv_cell(value)) if isinstance(value, str) else json.dumps(value)


def _samples(row: Mapping[str, str]) -> float:
    try:
        return float(row.get("samples") or 0)
    except ValueError:
        return 0.0


def _set_aside(path: Path) -> None:
    count = 1
    while (other := path.with_name(f"{path.stem}-{count}{path.suffix}")).exists():
        count += 1
    path.rename(other)
