"""Failing on purpose, as `--inject` orders.

Invariants: what is done to this process is what a cluster does to it, nothing gentler; nothing calls it unless
somebody ordered it.
"""

import os
import signal
import threading
import time


class InjectedError(RuntimeError):
    """Ordered by `--inject raise(...)`."""


def break_down(how: str, after_s: float = 0.0) -> None:
    """Fail now, or `after_s` from now by a thread of its own, whatever this one is doing then."""
    if after_s:
        threading.Timer(after_s, break_down, [how]).start()
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
