"""A log by somebody else's library, which must not end a training: whatever it raises costs its rows, and no more.

Invariants: the library is imported at the first row. After its first exception it is not called any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Library(Protocol):
    """What a library's log does; anything may be raised."""

    def row(self, row: Mapping[str, object]) -> None:
        """One row of `metrics.jsonl`."""

    def close(self) -> None:
        """The report is over."""


class GuardedLog:
    """The log that `make()` makes, in `place` of the run directory."""

    def __init__(self, place: str, make: Callable[[], Library]):
        self.place, self._make = place, make
        self._log: Library | None = None
        self._is_broken = False

    def row(self, row: Mapping[str, object]) -> None:
        """One row; raises OSError at the first exception of the library."""
        if self._is_broken:
            return
        try:
            self._log = self._log or self._make()
            self._log.row(row)
        except Exception as error:
            self._is_broken = True
            raise OSError(_short(error)) from error

    def close(self) -> None:
        """The report is over. May be called twice."""
        log, self._log = self._log, None
        if log is None or self._is_broken:
            return
        try:
            log.close()
        except Exception as error:
            raise OSError(_short(error)) from error


def _short(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
