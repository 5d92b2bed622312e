"""Who of the ranks still answers, asked through the run directory by one that has waited for the others for too long.

    RUN_DIR/stacks/roll-1763723821093/call-0  here-0-0 here-0-2  call-1 ...

Invariants: as in `alarm.py` names of files alone, and threads that call neither MPI nor CUDA. Who answers nothing
has no thread left that runs: its process is stopped, its host is gone, or it is inside a call that lets no other thread
run. A rank that merely waits, or works, says so; one that is stuck says that too, and its own watchdog ends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from mpitrain.training.watchdog.alarm_files import FOLDER, LOOK_EVERY_S


class RollCall:
    """This rank's side.

    Args:
        run_dir: of the run; rank: at launch; start: a number of this start's own, the same on all ranks.
    """

    def __init__(self, run_dir: Path, rank: int, start: int):
        self.rank = rank
        self.folder = run_dir / FOLDER / f"roll-{start}"
        self._answered = -1

    def answer(self) -> None:
        """Answer the newest call, if somebody has called."""
        newest = self._newest()
        if newest > self._answered:
            self._answered = newest
            with contextlib.suppress(OSError):
                (self.folder / f"here-{newest}-{self.rank}").touch()

    def call(self, ranks: set[int], patience_s: float, over: Callable[[], bool] = lambda: False) -> set[int]:
        """Who of `ranks` has not answered within `patience_s`; nobody, should it be `over` meanwhile, or where this one
        cannot answer either, as on a full disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = self._newest() + 1
            (self.folder / f"call-{number}").touch()
            self.answer()
            if self.rank not in self._here(number):
                return set()
        except OSError:
            return set()
        deadline_s = time.monotonic() + patience_s
        while silent := ranks - self._here(number) - {self.rank}:
            if over():
                return set()
            if time.monotonic() > deadline_s:
                return silent
            time.sleep(LOOK_EVERY_S + len(ranks) / 1000)  # all of them may be looking
            self.answer()  # somebody else may have called in between
        return set()

    def _newest(self) -> int:
        if not self.folder.is_dir():
            return -1
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("call-*")), default=-1)

    def _here(self, number: int) -> set[int]:
        """Who has answered this call, or a later one."""
        said = (path.name.split("-")[1:] for path in self.folder.glob("here-*"))
        return {int(rank) for call, rank in said if int(call) >= number}
