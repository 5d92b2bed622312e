"""A rank that neither works nor waits for others for too long writes down where it stands and ends the job.

Law of this file: a thread of its own that calls neither MPI nor CUDA, so that it works while the main thread is stuck
in either. Progress is any step, push, answer or validation batch of this rank; to wait for another rank, however long
(a warm-up, a validation over there), is no hang, for the rank that hangs has a watchdog of its own. The launcher then
starts the run again from its newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from pathlib import Path
from typing import Any

from mpitrain.errors import MpitrainError

FOLDER = "stacks"
GRACE_S = 1.0  # beside one round of looking: the rank where it hangs may not be the first to notice, and is to be heard


class StalledError(MpitrainError):
    """No progress within the watchdog's time."""


class Watchdog:
    """Watches `runtime.stamp_s`; a context manager for the time in which progress is owed.

    Args:
        runtime: this process's; run_dir: where the stacks go, as `stacks/rank-N.txt`.
        timeout_s: longest time without progress; 0 is no watchdog.
    """

    def __init__(self, runtime: Any, run_dir: Path, timeout_s: float):
        self.runtime, self.timeout_s = runtime, timeout_s
        self.path = run_dir / FOLDER / f"rank-{runtime.rank}.txt"
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        if self.timeout_s > 0:
            self.runtime.stamp()
            threading.Thread(target=self._watch, name="mpitrain-watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(5.0, self.timeout_s / 4)):
            if self.runtime.engine.arriving:
                self.runtime.stamp()
            if self.runtime.idle_s() > self.timeout_s:
                self._bark()
                return

    def _bark(self) -> None:
        where = self.runtime.where()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(f"{where}: no progress for {self.timeout_s:g} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
        time.sleep(GRACE_S + min(5.0, self.timeout_s / 4))
        raise StalledError(
            f"{where}: no progress for {self.timeout_s:g} s (--watchdog-s); the stacks of its threads: {self.path}"
        )  # ends the whole job: see mpi/ending.py
