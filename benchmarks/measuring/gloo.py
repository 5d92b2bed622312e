"""Process groups of torch's gloo, the peer of most benchmarks."""

from __future__ import annotations

import ctypes
from typing import Any


def never_destroyed(*objects: Any) -> None:
    """Keep groups of torch's gloo, and what holds them, for as long as the process lives.

    torch 2.13 destroys such a group by joining its threads with Python's lock held, and a thread that just then lets go
    of its last work waits for that lock: the process hangs, under load once in some tens of times.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
