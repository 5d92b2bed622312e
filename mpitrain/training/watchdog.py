"""A rank that neither works nor waits for others for too long raises the alarm and ends the job.

Law of this file: a thread of its own that calls neither MPI nor CUDA, so that it works while the main thread is stuck
in either. Progress is any step, push, answer or validation batch of this rank. To wait for another rank (a warm-up, a
validation over there) is no hang, for the rank that hangs has a watchdog of its own; but where everybody waits for
everybody nobody would bark, so who has only waited for `PATIENCE` times as long looks whether the run itself still
moves, by its metrics file. Every rank that hears the alarm writes its stacks, and its part of an emergency checkpoint,
before the one that raised it ends the job; the launcher then starts the run again from there. A rank that the others
go on without (`levels.py`) raises no alarm: it writes its own stacks and dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import threading
import time
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import newest
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.report import METRICS_FILE
from mpitrain.training.alarm import Alarm
from mpitrain.training.emergency import Emergency

PATIENCE = 4
LOOK_EVERY_S = 2.0
# beside one round of looking, for ranks that do not answer; those that do end the waiting at once
GRACE_S = 10.0
WRITING_S = 60.0  # longest time to wait for an emergency checkpoint


class StalledError(MpitrainError):
    """No progress within the watchdog's time."""


class Watchdog:
    """Watches `runtime.stamp_s`; a context manager for the time in which progress is owed, entered by all ranks.

    Args:
        runtime: this process's; session: of the run: where the stacks go, as `stacks/rank-N.txt`, and its `emergency`.
        timeout_s: longest time without progress; 0 is no watchdog.
    """

    def __init__(self, runtime: Any, session: Any, timeout_s: float):
        self.runtime, self.session, self.timeout_s = runtime, session, timeout_s
        self.run_dir: Path = session.run_dir
        self.metrics = self.run_dir / METRICS_FILE
        self.look_s = min(LOOK_EVERY_S, timeout_s / 4)
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        start = self.runtime.share(time.time_ns())
        self.alarm = Alarm(self.run_dir, self.runtime.launched_rank, start)
        if self.timeout_s > 0:
            self.runtime.stamp()
            threading.Thread(target=self._watch, name="mpitrain-watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    def _watch(self) -> None:
        heard = False
        while not self._over.wait(self.look_s):
            if self.runtime.engine.arriving:
                self.runtime.stamp_waiting()
            if self._is_stuck():
                self._bark(heard)
                return
            if not heard and (stuck := self.alarm.rung_by()):
                heard = True
                self._write(
                    f"{self.runtime.where()}: rank {stuck[0]} saw no progress, and asks all for their stacks"
                )

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

    def _bark(self, heard: bool) -> None:
        """Ends the job, whatever the file system does: see mpi/ending.py."""
        what = f"{self.runtime.where()}: no progress for {self.timeout_s:g} s"
        told = "; it dies alone, and the others go on"
        try:
            if self._dies_alone():
                self._write_stacks(what)
            else:
                self.alarm.ring()
                if not heard:
                    threading.Thread(target=self._write, args=(what,), daemon=True).start()
                told = self._outcome(
                    self.alarm.wait(set(self.runtime.launched), self.look_s + GRACE_S, WRITING_S)
                )
        except Exception as error:
            told = f"; and what is known could not be written: {type(error).__name__}: {error}"
        raise StalledError(f"{what} (--watchdog-s); the stacks of its threads: {self.alarm.stacks}{told}")

    def _dies_alone(self) -> bool:
        """Whether the others go on without this rank."""
        runtime = self.runtime
        if runtime.fault_tolerance == "heartbeat":
            return bool(runtime.expendable and runtime.rank != 0)
        return bool(runtime.fault_tolerance == "ulfm" and (runtime.expendable or runtime.recovers))

    def _outcome(self, said: dict[int, str]) -> str:
        """What came of the alarm, for the last words."""
        missing = sorted(set(self.runtime.launched) - set(said))
        told = f"; stacks of {len(said)} of {len(said) + len(missing)} ranks are there"
        told += f" (none of rank {', '.join(map(str, missing))})" if missing else ""
        why_not = [f"rank {rank}: {text}" for rank, text in said.items() if text]
        cut = self.alarm.cut(0.0)
        if cut is not None:
            with contextlib.suppress(CheckpointError):
                found = newest(self.run_dir)
                if found is not None and found.mark == cut.mark:
                    return f"{told}; emergency checkpoint at {cut.mark} samples: {found.folder}"
        return (
            f"{told}; no emergency checkpoint: {'; '.join(why_not) or 'a part of it was not written in time'}"
        )

    def _write(self, head: str) -> None:
        """Stacks first, then this rank's part of an emergency checkpoint."""
        why_not = ""
        try:
            self.alarm.begin()
            self._write_stacks(head)
            emergency: Emergency | str = self.session.emergency
            if isinstance(emergency, Emergency):
                emergency.write(self.alarm)
            elif emergency:
                why_not = emergency
        except CheckpointError as error:
            why_not = str(error)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            if why_not:
                with open(self.alarm.stacks, "a", encoding="utf-8") as file:
                    file.write(f"\nno emergency checkpoint: {why_not}\n")
            self.alarm.end(why_not)

    def _write_stacks(self, head: str) -> None:
        self.alarm.stacks.parent.mkdir(parents=True, exist_ok=True)
        with open(self.alarm.stacks, "w", encoding="utf-8") as file:
            file.write(f"{head}\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
