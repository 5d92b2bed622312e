"""SIGUSR1, SIGTERM and SIGHUP ask a run to write a checkpoint and end with exit code 75; SIGINT ends it with 130;
SIGQUIT writes the stacks of its threads.

Invariants: the handler only sets a flag. Receive loops poll (no rank blocks inside MPI), so the flag is seen within one
sleep or one batch. When a second SIGTERM or SIGHUP ends this rank at once is said in `system/launched/end_requests.py`;
it then dies of SIGTERM, which from that moment on the kernel handles, so that it ends whatever it is stuck in, and the
launcher ends the others. A second SIGINT does so at any time, in a process that is a rank or runs the command. A
request of the launch to all ranks counts as a signal to each (`rank_status.py`).
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from typing import Any

from mpitrain.system import background, interrupts, stacks
from mpitrain.system.flag import Flag
from mpitrain.system.launched import rank_status, time_limit
from mpitrain.system.launched.end_requests import AGAIN_S, ENDS, EndRequests, asking
from mpitrain.system.launched.launch_variables import is_rank

_asked = Flag()
_before: dict[int, Any] = {}
_ends: EndRequests | None = None  # of this run, from its first on
_is_command = False


def _ask(number: int, _frame: object) -> None:
    global _ends
    _asked.set()
    rank_status.note_asked()
    if number not in ENDS:
        return
    first = _ends is None
    _ends = _ends or EndRequests()
    if _ends.hear(time.monotonic()):
        _die_of_term()
    elif first and not _ends.patient:
        background.start("ends", _let_term_end, _ends)


def _let_term_end(ends: EndRequests) -> None:
    """In `AGAIN_S` SIGTERM ends this process, also while the main thread, the only one in which Python handles signals,
    is in native code."""
    time.sleep(AGAIN_S)
    if _ends is ends:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)


def _die_of_term(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _forget_ends() -> None:
    global _ends
    _ends = None


def _interrupt(number: int, frame: object) -> None:
    if _is_command or is_rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    interrupts.interrupt(number, frame)


def install_early() -> None:
    """From here on the signals ask for an end, whatever this process does: for a process that is a rank all its life.
    A request before the run begins holds for the run, and one after its end changes nothing."""
    global _is_command
    _is_command = True
    if threading.current_thread() is threading.main_thread():
        for number in asking():
            signal.signal(number, _ask)
        stacks.listen()
        # held back since this process began (`__main__.py`, `cli`), or by whoever started it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, *ENDS))


def install() -> None:
    """From here on the signals ask for an orderly end; only the main thread can install them."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGUSR1) is not _ask:
            _asked.clear()  # of an earlier run of this process
            _forget_ends()
        for number in asking():
            if signal.getsignal(number) is not _ask:
                _before[number] = signal.signal(number, _ask)
        if signal.getsignal(signal.SIGINT) is not interrupts.interrupt:
            interrupts.begin()
        _before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
        stacks.listen()
    rank_status.listen(True)


def end_at_once() -> None:
    """In a run that writes no checkpoints the signals end it as it is."""
    rank_status.listen(False)
    if threading.current_thread() is threading.main_thread():
        _forget_ends()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in asking():
            if number != signal.SIGTERM:
                signal.signal(number, _die_of_term)
        if _asked.is_set():
            signal.raise_signal(signal.SIGTERM)


def uninstall() -> None:
    """Give the signals back their meaning, after a run."""
    if _before:
        _forget_ends()
        stacks.unlisten()
    for number, handler in _before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _before.clear()


def ignore() -> None:
    """The run is over and this process ends: what asks for an end changes nothing any more. Python gives signals with a
    handler of its own their default meaning before the libraries are unloaded, which takes a moment with torch."""
    if threading.current_thread() is threading.main_thread():
        _forget_ends()
        for number in (signal.SIGUSR1, *ENDS):
            signal.signal(number, signal.SIG_IGN)


def asked() -> bool:
    """Whether this process has been asked to end, or has to."""
    interrupts.check()
    return _asked.is_set() or rank_status.stop_requested() or time_limit.is_near()
