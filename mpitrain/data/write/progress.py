"""How far packing is, reported now and then: rank 0's part stands for all, since shards are assigned evenly."""

from __future__ import annotations

import time
from typing import Protocol

TERMINAL_S, LOG_S = 0.2, 30.0  # between two lines


class Line(Protocol):
    """Where progress is drawn; `mpitrain.reporting.console.Console` is one."""

    is_terminal: bool

    def progress(self, text: str, share: float | None, left_s: float | None) -> None: ...


class Pace:
    """Called with (`things` done, things to do or None) of this rank; draws a line a few times a second on a
    terminal, and two a minute in a log."""

    def __init__(self, line: Line, text: str, things: str, num_ranks: int = 1):
        self._line, self._text, self._things, self._num_ranks = line, text, things, num_ranks
        self._began_s = self._reported_s = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s < (TERMINAL_S if self._line.is_terminal else LOG_S):
            return
        self._reported_s = now_s
        pace = done / (now_s - self._began_s)
        share = done / total if total else None
        left_s = (total - done) / pace if total and pace else None
        ranks = f" a rank, {self._num_ranks} ranks" if self._num_ranks > 1 else ""
        count = f"{done} of {total}" if total else str(done)
        self._line.progress(
            f"{self._text}: {count} {self._things}{ranks}, {pace:.0f} a second", share, left_s
        )
