"""SIGUSR1 and SIGTERM ask a run to write a checkpoint and end with exit code 75.

Law of this file: the handler only sets a flag. Receive loops poll (no rank blocks inside MPI), so it is seen within
one nap or one batch.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

_asked = threading.Event()
_before: dict[int, Any] = {}


def install() -> None:
    """From here on the two signals ask for an orderly end; only the main thread can install them."""
    _asked.clear()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            _before[number] = signal.signal(number, lambda *_: _asked.set())


def uninstall() -> None:
    """Give the two signals back their meaning: after a run, or in one that writes no checkpoints."""
    for number, handler in _before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _before.clear()


def asked() -> bool:
    """Whether this process has been asked to end."""
    return _asked.is_set()
