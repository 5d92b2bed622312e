"""Failures of this process on purpose, as `--inject` orders them.

Invariants: the process fails exactly as it would on a cluster, never more gently; nothing calls this unless a user
ordered it.
"""

import os
import signal
import threading
import time

from mpitrain.errors import InjectedError


def self_destruct(how: str, after_s: float = 0.0) -> None:
    """Fail now, or `after_s` from now in a thread of its own, whatever this thread does then."""
    if after_s:
        threading.Timer(after_s, self_destruct, [how]).start()
    elif how == "exit":
        os._exit(3)
    elif how == "raise":
        raise InjectedError("ordered by --inject")
    elif how == "wedge":
        while True:
            time.sleep(0.1)
    else:
        os.kill(os.getpid(), _SIGNALS[how])


_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
