"""The random numbers of this process: the generators of torch, numpy and Python belong to all its threads.

Invariants: whoever seeds them, or draws from them what is to depend on that seed alone, holds this lock meanwhile.
Where a process has one replica nobody else asks for it. A process is forked by whoever holds it, so that its child
finds it free, and no generator in the hands of a thread that the child does not have.
"""

import os
import threading

LOCK = threading.RLock()
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
