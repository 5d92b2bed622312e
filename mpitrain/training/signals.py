"""SIGUSR1 and SIGTERM ask a run to write a checkpoint and end with exit code 75; SIGINT ends it with 130.

Invariants: the handler only sets a flag. Receive loops poll (no rank blocks inside MPI), so the flag is seen within one
sleep or one batch. A second SIGTERM or SIGINT is handled by the kernel: it ends this rank at once, whatever it is stuck
in, and the launcher ends the others. A request of the launch to all ranks counts as a signal to each
(`rank_status.py`).
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from mpitrain.system import rank_status

_asked = threading.Event()
_before: dict[int, Any] = {}


def _ask(number: int, _frame: Any) -> None:
    _asked.set()
    rank_status.note_asked()
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, _frame: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def install_early() -> None:
    """From here on the two signals ask for an end, whatever this process does: for a process that is a rank all its
    life. A request before the run begins holds for the run, and one after its end changes nothing."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, _ask)
        # held back since this process began (`__main__.py`, `cli`), or by whoever started it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGTERM))


def install() -> None:
    """From here on the two signals ask for an orderly end; only the main thread can install them."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGUSR1) is not _ask:
            _asked.clear()  # of an earlier run of this process
        for number, handler in ((signal.SIGUSR1, _ask), (signal.SIGTERM, _ask), (signal.SIGINT, _interrupt)):
            if not (number == signal.SIGTERM and _asked.is_set()):
                _before[number] = signal.signal(number, handler)
    rank_status.listen(True)


def end_at_once() -> None:
    """In a run that writes no checkpoints the two signals end it as it is."""
    rank_status.listen(False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
        if _asked.is_set():
            signal.raise_signal(signal.SIGTERM)


def uninstall() -> None:
    """Give the signals back their meaning, after a run."""
    for number, handler in _before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _before.clear()


def ignore() -> None:
    """The run is over and this process ends: what asks for an end changes nothing any more. Python gives signals with a
    handler of its own their default meaning before the libraries are unloaded, which takes a moment with torch."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def asked() -> bool:
    """Whether this process has been asked to end."""
    return _asked.is_set() or rank_status.stop_requested()
