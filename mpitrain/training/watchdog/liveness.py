"""The liveness check: a rank that has waited for the others for too long asks through the run directory who of them
still answers.

    RUN_DIR/stacks/liveness-1763723821093/question-0  answer-0-0 answer-0-2  question-1 ...

Invariants: as in `alarm_files.py`, the ranks use names of files alone, and threads that call neither MPI nor a device.
A rank that does not answer has no thread left that runs: its process is stopped, its host is gone, or it is inside a
call that lets no other thread run. A rank that merely waits or works answers, and so does one that is stuck; its own
watchdog ends that one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from mpitrain.system import awake
from mpitrain.training.watchdog.alarm_files import FOLDER, LOOK_EVERY_S


class LivenessCheck:
    """This rank's side.

    Args:
        run_dir: of the run; rank: at launch; start: a number of this start's own, the same on all ranks.
    """

    def __init__(self, run_dir: Path, rank: int, start: int):
        self.rank = rank
        self.folder = run_dir / FOLDER / f"liveness-{start}"
        self._answered = -1

    def answer(self) -> None:
        """Answer the newest question, if a rank has asked."""
        newest = self._newest()
        if newest > self._answered:
            self._answered = newest
            with contextlib.suppress(OSError):
                (self.folder / f"answer-{newest}-{self.rank}").touch()

    def ask(self, ranks: set[int], patience_s: float, over: Callable[[], bool] = lambda: False) -> set[int]:
        """The ranks among `ranks` that have not answered within `patience_s`; none if `over()` becomes true meanwhile,
        or if this rank cannot answer either, as on a full disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = self._newest() + 1
            (self.folder / f"question-{number}").touch()
            self.answer()
            if self.rank not in self._answered_by(number):
                return set()
        except OSError:
            return set()
        deadline_s = awake.now_s() + patience_s
        while silent := ranks - self._answered_by(number) - {self.rank}:
            if over():
                return set()
            if awake.now_s() > deadline_s:
                return silent
            time.sleep(LOOK_EVERY_S + len(ranks) / 1000)  # all of them may be looking at the folder
            self.answer()  # another rank may have asked in between
        return set()

    def _newest(self) -> int:
        if not self.folder.is_dir():
            return -1
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("question-*")), default=-1)

    def _answered_by(self, number: int) -> set[int]:
        """The ranks that have answered this question or a later one."""
        answers = (path.name.split("-")[1:] for path in self.folder.glob("answer-*"))
        return {int(rank) for question, rank in answers if int(question) >= number}
