"""Printing for people and for logs, which never ends anything.

Invariants: what a stream's encoding lacks is escaped, and a stream that is closed, broken or full loses the text.
Standard library only.
"""

from __future__ import annotations

import contextlib
from typing import TextIO


def say(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Print `text`, and never raise."""
    if stream is None:  # a process that was started without it
        return
    with contextlib.suppress(OSError, ValueError):
        try:
            stream.write(text + end)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write((text + end).encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def flush(stream: TextIO | None) -> None:
    """Hand on what was printed, as far as anybody takes it."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()


def escape_what_cannot_be_printed(*streams: TextIO | None) -> None:
    """From here on `print` to these streams escapes what their encoding lacks, such as names of files."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(OSError, ValueError):
                reconfigure(errors="backslashreplace")
