"""What validations have measured of the one metric that a scheduler goes by, such as torch's `ReduceLROnPlateau`.

Invariants: one rank measures, all others are told, and everybody keeps the same rows in the order of samples. A row
that comes again, since a run has gone back behind it, takes the place of those from its samples on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """What was measured after so many whole epochs and accepted samples."""

    epoch: int
    samples: int
    value: float


class Figures:
    """All of a run so far, on one rank."""

    def __init__(self) -> None:
        self.rows: list[Figure] = []

    def take_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        """These have come."""
        for row in rows:
            one = Figure(int(row[0]), int(row[1]), float(row[2]))
            if one in self.rows:
                continue
            self.rows = [*(before for before in self.rows if before.samples < one.samples), one]

    def told(self, after: int = -1) -> str:
        """Those of more than so many samples, for `take_told`; empty where there are none."""
        rows = [row for row in self.rows if row.samples > after]
        return json.dumps(rows) if rows else ""

    def take_told(self, text: str) -> None:
        """What `told` has made a text of, elsewhere."""
        self.take_rows(json.loads(text) if text else ())


def merged(first: str, second: str) -> str:
    """Two texts of `told` as one."""
    figures = Figures()
    figures.take_told(first)
    figures.take_told(second)
    return figures.told()
