"""What ranks tell one another through the run directory when one of them sees no progress any more.

    RUN_DIR/stacks/rank-0.txt  rank-1.txt ...  alarm-1763723821093/by-1  0.busy 0.done ... cut.json

Invariants: names of files alone, since neither MPI nor the main threads may answer. The folder's being there is
the alarm; its number is this start's, so that a run that was resumed does not hear the alarm of the start before. Every
rank that hears it leaves `N.busy` while it writes and `N.done`, with what came of it, afterwards.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpitrain.system.atomic import write_whole
from mpitrain.system.folders import make_private

FOLDER = "stacks"
LOOK_EVERY_S = 0.05


class Cut(NamedTuple):
    """The emergency checkpoint as whoever writes its first part names it: accepted samples, the step or version of that
    rank, and all parts."""

    mark: int
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

    def ring(self) -> None:
        """This rank makes no progress."""
        make_private(self.run_dir, FOLDER, self.folder.name)
        (self.folder / f"by-{self.rank}").touch()

    def rung_by(self) -> list[int]:
        """Ranks that make no progress; empty while all is well."""
        return self._ranks("by-*") if self.folder.is_dir() else []

    def begin(self) -> None:
        """This rank has heard, and is writing."""
        self._write(f"{self.rank}.busy", "")

    def end(self, text: str) -> None:
        """This rank has written what it could; `text`: why it wrote no part of a checkpoint, where it should have."""
        self._write(f"{self.rank}.done", text)

    def wait(self, living: set[int], patience_s: float, writing_s: float) -> dict[int, str]:
        """What ranks have said at the end, when all `living` have, or `patience_s` have passed and nobody writes any
        more, or `writing_s` have."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < writing_s:
            done = self._ranks("*.done")
            busy = set(self._ranks("*.busy")) - set(done)
            if living.issubset(done) or (waited_s >= patience_s and not busy):
                break
            time.sleep(LOOK_EVERY_S)
        told = {}
        for rank in self._ranks("*.done"):
            with contextlib.suppress(OSError):
                told[rank] = (self.folder / f"{rank}.done").read_text()
        return told

    def name(self, cut: Cut | None) -> None:
        """Tell the others which checkpoint is being written; None: there will be none."""
        self._write("cut.json", json.dumps(cut))

    def cut(self, wait_s: float) -> Cut | None:
        """The checkpoint that is being written; None if there will be none, or nobody has named it in time."""
        deadline_s = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(OSError):
                told = json.loads((self.folder / "cut.json").read_text())
                return None if told is None else Cut(told[0], told[1], tuple(told[2]))
            if time.monotonic() > deadline_s:
                return None
            time.sleep(LOOK_EVERY_S)

    def _ranks(self, pattern: str) -> list[int]:
        names: Iterable[str] = (path.name for path in self.folder.glob(pattern))
        return sorted(int("".join(filter(str.isdigit, name))) for name in names if not name.startswith("."))

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text, tag=str(self.rank))
