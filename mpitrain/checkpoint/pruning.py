"""Which checkpoints of a run are kept: the newest complete ones. Whoever writes the first part removes the others.

Invariants: of what this start has written the names in the folders say whether it is complete, since a part's JSON is
renamed into place last; no file is opened. A folder that was there before this start may hold parts of another one, so
its parts are opened, until it is known to be complete.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from mpitrain.checkpoint.parts import survey
from mpitrain.errors import CheckpointError
from mpitrain.system.files.part_places import written
from mpitrain.system.files.run_directory import Identity, listed, position_of


class Pruner:
    """Made before this start writes anything to `run_dir`."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._before = {position_of(folder) for folder in listed(run_dir)}
        self._parts: dict[int, Sequence[str]] = {}  # of what this start has written alone
        self._complete: set[int] = set()

    def prune(self, keep: int, checkpoint_at: int, identity: Identity, parts: Sequence[str]) -> None:
        """Remove old checkpoints, after the first part of the one at `checkpoint_at` was written, whose names are
        `parts`: all but the `keep` newest complete ones up to there, and incomplete ones older than these. Checkpoints
        that earlier starts have left beyond the one from which this start began were passed over then, and do not
        count."""
        if checkpoint_at not in self._before:
            self._parts[checkpoint_at] = parts
        complete = 0
        for folder in listed(self.run_dir):
            if (here := position_of(folder) or 0) > checkpoint_at:
                continue
            if complete >= keep:
                shutil.rmtree(folder, ignore_errors=True)
                self._parts.pop(here, None)
                continue
            if here in self._complete or self._is_complete(folder, here, identity):
                self._complete.add(here)
                complete += 1

    def _is_complete(self, folder: Path, here: int, identity: Identity) -> bool:
        if here in self._parts:
            return written(folder).issuperset(self._parts[here])
        source = identity.resumed_from
        base = source["checkpoint_at"] if source and source["run"] == identity.run else -1
        with contextlib.suppress(CheckpointError):
            attempt = survey(folder).identity.attempt
            return here <= base or identity.is_same_start(attempt)
        return False
