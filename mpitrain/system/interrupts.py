"""SIGINT, as from a notebook's stop button, is KeyboardInterrupt for whoever has called us, whatever was under way.

Invariants: Python raises KeyboardInterrupt wherever the main thread is. In a function that C++ has called, as in a
backward pass, it comes out as another error; in a destructor or a callback it is printed and lost. So it is remembered
that the signal came, and every other end of the call is turned into KeyboardInterrupt. Standard library only.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_heard = threading.Event()


def interrupt(_number: int, _frame: Any) -> None:
    """The handler."""
    _heard.set()
    raise KeyboardInterrupt


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
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard.clear()
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if _heard.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _heard.is_set():
        raise KeyboardInterrupt
