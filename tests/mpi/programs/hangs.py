"""Every rank sleeps for ever in a function; rank 1 also ignores SIGTERM and has a child of its own.

Argument: a file for the process numbers.
"""

import os
import signal
import subprocess
import sys
import time

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def sleeps_for_ever() -> None:
    time.sleep(1000)


signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"]) if rank == 1 else None
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\n" + (f"{child.pid}\n" if child else ""))
print("before the hang")
sleeps_for_ever()
