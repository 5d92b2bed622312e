"""The line for eyes: drawn over itself on a terminal, one dated line after another in a log.

Invariants: what it prints can be lost without loss. Nothing parses it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import TextIO

from mpitrain.errors import printable
from mpitrain.system.saying import write
from mpitrain.system.sizes import significant


class Console:
    """Progress and events on one stream; silent if `quiet`."""

    def __init__(self, stream: TextIO | None, quiet: bool) -> None:
        self._stream, self._quiet, self._drawn = stream, quiet, False
        # mpirun puts a pipe between rank 0 and the terminal; `mpitrain launch` says how wide its own is.
        width = os.environ.get("MPITRAIN_TERMINAL", "") if stream is sys.stderr else ""
        is_drawn_on = _is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"
        self.is_terminal = width.isdigit() or is_drawn_on
        self._columns = int(width) if width.isdigit() else None

    def progress(self, text: str, share: float | None, left_s: float | None) -> None:
        """Redraw the line, or print a dated one; `share` of the run done and seconds left, where known."""
        if self._quiet:
            return
        text = printable(text)
        if not self.is_terminal:
            self._say(f"{date()} {text}\n")
            return
        bar = ""
        if share is not None:
            filled = round(min(share, 1.0) * 20)
            bar = f"{min(share, 1.0):4.0%} [{'=' * filled}{' ' * (20 - filled)}] "
        left = f" {_minutes(left_s)} left" if left_s is not None else ""
        self._say("\r" + f"{bar}{text}{left}"[: self.width] + "\x1b[K")
        self._drawn = True

    @property
    def width(self) -> int | None:
        """Letters that fit on a line of the terminal; None in a log."""
        if not self.is_terminal:
            return None
        return (self._columns or shutil.get_terminal_size().columns) - 1  # a full line would wrap and scroll

    def event(self, text: str) -> None:
        """Print a line that stays."""
        if self._quiet:
            return
        self.clear()
        text = printable(text)
        self._say(f"{text}\n" if self.is_terminal else f"{date()} {text}\n")

    def insist(self, text: str) -> None:
        """What must be reported even if `quiet`; otherwise a line has reported it before."""
        if self._quiet:
            self._say(f"{printable(text)}\n")

    def clear(self) -> None:
        """Take the drawn line away, so that what others print starts at the margin."""
        if self._drawn:
            self._say("\r\x1b[K")
            self._drawn = False

    def _say(self, text: str) -> None:
        write(self._stream, text)


def _is_terminal(stream: TextIO | None) -> bool:
    with contextlib.suppress(ValueError):  # it is closed
        return stream is not None and stream.isatty()
    return False


def short(value: object) -> str:
    """A number at four significant digits."""
    return significant(value) if isinstance(value, float) else str(value)


def date() -> str:
    """Local date and time, as at the head of every log line."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _minutes(seconds: float) -> str:
    """Minutes and seconds as 3:05, hours as 1:02:03."""
    whole, rest = divmod(round(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"
