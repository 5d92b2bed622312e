"""The alarm that a rank raises when it sees no progress any more: files in the run directory.

    RUN_DIR/stacks/rank-0.txt  rank-1.txt ...  alarm-1763723821093/by-1  0.busy 0.done ... checkpoint.json

Invariants: the ranks exchange files alone, since neither MPI nor the main threads may answer. The alarm is raised when
its folder exists; the folder's number is that of this start, so a run that was resumed does not see the alarm of the
start before. Every rank that sees the alarm leaves `N.busy` while it writes, and afterwards `N.done` with the outcome.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpitrain.system import awake
from mpitrain.system.files.atomic import write_whole
from mpitrain.system.files.folders import make_private

FOLDER = "stacks"
LOOK_EVERY_S = 0.05


class EmergencyCheckpoint(NamedTuple):
    """The emergency checkpoint, as the rank that writes its first part announces it: `checkpoint_at` accepted samples,
    that rank's step or version, and the names of all parts."""

    checkpoint_at: int
    step: int
    parts: tuple[str, ...]


class Alarm:
    """This rank's side.

    Args:
        run_dir: of the run; rank: at launch; start: a number of this start's own, the same on all ranks.
    """

    def __init__(self, run_dir: Path, rank: int, start: int):
        self.run_dir, self.rank = run_dir, rank
        self.folder = run_dir / FOLDER / f"alarm-{start}"
        self.stacks = run_dir / FOLDER / f"rank-{rank}.txt"

    def raise_alarm(self) -> None:
        """Raise the alarm: this rank makes no progress."""
        make_private(self.run_dir, FOLDER, self.folder.name)
        (self.folder / f"by-{self.rank}").touch()

    def raised_by(self) -> list[int]:
        """The ranks that have raised the alarm; none while all is well."""
        return self._ranks("by-*") if self.folder.is_dir() else []

    def begin(self) -> None:
        """This rank has seen the alarm, and is writing."""
        self._write(f"{self.rank}.busy", "")

    def end(self, text: str) -> None:
        """This rank has written what it could; `text` says why it wrote no part of a checkpoint, where it should
        have."""
        self._write(f"{self.rank}.done", text)

    def wait(self, living: set[int], patience_s: float, writing_s: float) -> dict[int, str]:
        """What each rank that is done has left as its outcome. Returns when all `living` are done, when `patience_s`
        have passed and no rank writes any more, or after `writing_s`."""
        began_s = awake.now_s()
        while (waited_s := awake.now_s() - began_s) < writing_s:
            done = self._ranks("*.done")
            busy = set(self._ranks("*.busy")) - set(done)
            if living.issubset(done) or (waited_s >= patience_s and not busy):
                break
            time.sleep(LOOK_EVERY_S)
        outcomes = {}
        for rank in self._ranks("*.done"):
            with contextlib.suppress(OSError):
                outcomes[rank] = (self.folder / f"{rank}.done").read_text()
        return outcomes

    def announce(self, checkpoint: EmergencyCheckpoint | None) -> None:
        """Announce to the others which checkpoint is being written; None: there will be none."""
        self._write("checkpoint.json", json.dumps(checkpoint))

    def announced(self, wait_s: float) -> EmergencyCheckpoint | None:
        """The checkpoint that is being written; None if there will be none, or none was announced in time."""
        deadline_s = awake.now_s() + wait_s
        while True:
            with contextlib.suppress(OSError):
                read = json.loads((self.folder / "checkpoint.json").read_text())
                return None if read is None else EmergencyCheckpoint(read[0], read[1], tuple(read[2]))
            if awake.now_s() > deadline_s:
                return None
            time.sleep(LOOK_EVERY_S)

    def _ranks(self, pattern: str) -> list[int]:
        names: Iterable[str] = (path.name for path in self.folder.glob(pattern))
        return sorted(int("".join(filter(str.isdigit, name))) for name in names if not name.startswith("."))

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text, tag=str(self.rank))
