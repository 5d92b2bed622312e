"""SIGQUIT writes the stacks of a process's threads, and the process goes on.

Invariants: the stacks are written by C code, so that they come whatever the threads are stuck in: to file descriptor 2,
for nothing else is known to be open. A launch asks its ranks for them through its folder (`rank_status.py`); then a
thread writes them into a file of the rank's own. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

_num_listening = 0


def listen() -> None:
    """From here on SIGQUIT writes stacks in place of ending the process. Each call is owed one of `unlisten`."""
    global _num_listening
    _num_listening += 1
    with contextlib.suppress(
        OSError
    ):  # a closed standard error: the signal then ends the process, as any other does
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True, chain=False)


def unlisten() -> None:
    """SIGQUIT has its own meaning again, unless another caller of `listen` is left."""
    global _num_listening
    _num_listening -= 1
    if not _num_listening:
        faulthandler.unregister(signal.SIGQUIT)


def write(folder: str, rank: int) -> None:
    """Append the stacks of all threads to FOLDER/rank-N.txt, or write them to standard error where there is none."""
    head = f"rank {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}: SIGQUIT to its launch\n\n"
    with contextlib.ExitStack() as stack:
        file = sys.__stderr__
        if folder:
            with contextlib.suppress(OSError):
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                path = Path(folder) / f"rank-{rank}.txt"
                file = stack.enter_context(open(path, "a", encoding="utf-8"))
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
