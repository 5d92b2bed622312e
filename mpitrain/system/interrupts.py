"""SIGINT, as from a notebook's stop button, is KeyboardInterrupt for whoever has called us, whatever was under way.

Invariants: Python raises KeyboardInterrupt wherever the main thread is. In a function that C++ has called, as in a
backward pass, it comes out as another error; in a destructor or a callback it is printed and lost. So it is remembered
that the signal came, and every other end of the call is turned into KeyboardInterrupt. A first one waits for the end
of what cannot be left half done, since the caller's process goes on: a `whole()`, which raises it there, and an import,
after which the run raises it where it looks; a second one waits for nothing. Standard library and `flag.py` only.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from mpitrain.system.flag import Flag

_heard = Flag()
_goes_on = False  # whether the process goes on after what is under way
_num_whole = 0


def interrupt(_number: int, frame: object) -> None:
    """The handler."""
    waits = _goes_on and not _heard.is_set() and (_num_whole > 0 or _is_import(frame))
    _heard.set()
    if not waits:
        raise KeyboardInterrupt


def _is_import(frame: Any) -> bool:
    """Whether a module is being imported there, as seen from the function of ours that is at work."""
    package = __name__.partition(".")[0]
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] == package and frame.f_code.co_name != "<module>":
            return False
        frame = frame.f_back
    return False


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """For a moment: what is made in here is made in full, or not at all by an error of its own."""
    global _num_whole
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _heard.is_set()
    _num_whole += 1
    try:
        yield
    finally:
        _num_whole -= 1
    if not before and not _num_whole:
        check()


def heard() -> bool:
    """Whether SIGINT has come to what is under way."""
    return _heard.is_set()


def begin() -> None:
    """What is under way from here on has not got one."""
    _heard.clear()


def check() -> None:
    """Raise in the main thread what was lost on the way."""
    if _heard.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Where torch or the user's code runs: SIGINT ends this block by KeyboardInterrupt and by nothing else. A handler
    that somebody else has installed stays. Also a decorator."""
    global _goes_on
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard.clear()
    _goes_on = True
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if _heard.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        _goes_on = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _heard.is_set():
        raise KeyboardInterrupt
