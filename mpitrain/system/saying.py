"""The one place where text leaves for a terminal, a table or a page: how it is quoted there, and how it is printed.

Invariants: what stands in a name, an option or a file neither steers a terminal, nor becomes a formula in a spreadsheet
or markup in a page. Printing never raises: a reader that has gone, a closed stream, a full disk and letters that the
stream's encoding lacks end nothing; what a full disk has swallowed is `lost`. Standard library only.
"""

from __future__ import annotations

import contextlib
import html
import os
import sys
from typing import Any, TextIO

from mpitrain.errors import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_lost = ""  # why something for the standard output was not written


def say(*texts: object, sep: str = " ", end: str = "\n") -> None:
    """Print for people, or as a line that programs parse, on the standard output."""
    write(sys.stdout, printable(sep.join(map(str, texts))) + end)


def tell(*texts: object, sep: str = " ", end: str = "\n") -> None:
    """Print for people on the standard error."""
    write(sys.stderr, printable(sep.join(map(str, texts))) + end)


def hand_out(text: str) -> None:
    """Print a file's contents on the standard output as they are: a script, a table that is quoted already."""
    write(sys.stdout, text)


def write(stream: TextIO | None, text: str) -> None:
    """Write to a stream at once, if it takes anything; None is one that was closed before we began."""
    global _lost
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _drop(stream)
    except ValueError:  # it was closed meanwhile
        pass
    except OSError as error:
        _drop(stream)
        if stream is sys.stdout:
            _lost = error.strerror or str(error)


def flush(*streams: TextIO | None) -> None:
    """See that what others have printed is on its way, too; without streams, to both of ours."""
    for stream in streams or (sys.stdout, sys.stderr):
        write(stream, "")


def lost() -> str:
    """Why something for the standard output was not written; empty where all was, or nobody reads any more."""
    return _lost


def _drop(stream: TextIO) -> None:
    """From here on a stream of this process takes everything and keeps nothing, also what it still holds."""
    with contextlib.suppress(OSError, ValueError):
        if stream in (sys.__stdout__, sys.__stderr__):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def prepare_streams() -> None:
    """At the start of a command: give streams that were closed a place that keeps nothing, before a file of ours gets
    their number, and let the others take letters that their encoding lacks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)  # what we start needs them, too
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    escape_what_cannot_be_printed(sys.stdout, sys.stderr)


def escape_what_cannot_be_printed(*streams: TextIO | None) -> None:
    """From here on `print` to these streams escapes what their encoding lacks, such as names of files."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(OSError, ValueError):
                reconfigure(errors="backslashreplace")


def csv_cell(value: object) -> Any:
    """A cell of a table for spreadsheets: a text that one would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    quoted = printable(value)
    return f"'{quoted}" if value.startswith(_FORMULA) and not _is_number(value) else quoted


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "\t" not in text and "\r" not in text


def html_text(text: str) -> str:
    """The text of an element or an attribute of a page."""
    return html.escape(printable(text))
