"""The random numbers of this process: the generators of torch, numpy and Python belong to all its threads.

Invariants: whoever seeds them, or draws from them what is to depend on that seed alone, holds this lock meanwhile.
Where a process has one replica nobody else asks for it.
"""

import threading

LOCK = threading.RLock()
