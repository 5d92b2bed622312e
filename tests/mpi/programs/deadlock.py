"""Two ranks that wait for each other, under a watchdog."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpitrain.mpi.runtime import start
from mpitrain.training.watchdog.watchdog import Watchdog

runtime = start()
session: Any = SimpleNamespace(run_dir=Path(sys.argv[1]), emergency=None, why_no_emergency="nothing to write")
with Watchdog(runtime, session, 0.5):
    runtime.engine.wait(runtime.engine.irecv(bytearray(1), 1 - runtime.rank, 99))
