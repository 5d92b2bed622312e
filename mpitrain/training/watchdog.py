"""A rank that neither works nor waits for others for too long writes down where it stands and ends the job.

Law of this file: a thread of its own that calls neither MPI nor CUDA, so that it works while the main thread is stuck
in either. Progress is any step, push, answer or validation batch of this rank. To wait for another rank (a warm-up, a
validation over there) is no hang, for the rank that hangs has a watchdog of its own; but where everybody waits for
everybody nobody would bark, so who has only waited for `PATIENCE` times as long looks whether the run itself still
moves, by its metrics file. The launcher then starts the run again from its newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from pathlib import Path
from typing import Any

from mpitrain.errors import MpitrainError
from mpitrain.report import METRICS_FILE

FOLDER = "stacks"
PATIENCE = 4
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
        self.metrics = run_dir / METRICS_FILE
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
                self.runtime.stamp_waiting()
            if self._is_stuck():
                self._bark()
                return

    def _is_stuck(self) -> bool:
        if self.runtime.stuck_s() > self.timeout_s:
            return True
        return self.runtime.idle_s() > PATIENCE * self.timeout_s and self._quiet_s() > self.timeout_s

    def _quiet_s(self) -> float:
        """Seconds since the run has last told of anything."""
        try:
            return time.time() - self.metrics.stat().st_mtime
        except OSError:
            return math.inf

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
