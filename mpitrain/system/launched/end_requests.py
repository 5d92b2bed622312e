"""What TERM and HUP ask of a process of a job, whether it is a launch or a rank.

Invariants: the first asks for a checkpoint and an end. A further one within `AGAIN_S` is the same request again: batch
systems, closing terminals and `timeout` send several at once. By hand, a later one ends the process as it is; inside a
batch system none does, because the system ends what outlives its grace by KILL, and until then the checkpoint has the
time. HUP asks for nothing where it was ignored when the process began (`nohup`). Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from mpitrain.system.launched.launch_variables import batch_system

AGAIN_S = 5.0
# Asked for by the first of them; HUP is a terminal that is gone.
ENDS = (signal.SIGTERM, signal.SIGHUP)
_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def asking() -> tuple[signal.Signals, ...]:
    """The signals that ask this process for a checkpoint and an end."""
    return (signal.SIGUSR1, signal.SIGTERM, *(() if _nohup else (signal.SIGHUP,)))


def hold_back(words: Sequence[str]) -> None:
    """In a rank whose command has these words and hears the signals later: until then they wait, in place of ending
    it."""
    if words[:1] in (["train"], ["sweep"]) and "--dry-run" not in words:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, *ENDS))


def hold_back_in_command() -> None:
    """The same while the package is imported, which is before the command begins: only where this process is it."""
    by_module = sys.argv[0] == "-m" and "mpitrain" in sys.orig_argv
    if by_module or os.path.basename(sys.argv[0]) == "mpitrain":
        hold_back(sys.argv[1:])


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A thread that is started in this block gets none of the signals, so the main thread's mask decides."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, *ENDS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def take_back() -> None:
    """Give HUP and USR1 the meaning again that they have in Python, after a library has taken them without asking."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)


class EndRequests:
    """The TERM and HUP that one process has got. `patient`: no further one ends it at once."""

    def __init__(self) -> None:
        self.patient = batch_system() is not None
        self._first_s: float | None = None

    def hear(self, now_s: float) -> bool:
        """One more of them; whether it ends the process at once."""
        if self._first_s is None:
            self._first_s = now_s
        return not self.patient and now_s - self._first_s >= AGAIN_S
