"""Event files for TensorBoard in `RUN_DIR/tensorboard`, by torch's own writer.

Invariants: the step of a point is the number of accepted samples, which means the same under every strategy and for any
number of workers. A run that goes on has TensorBoard drop the points beyond the checkpoint, so no step comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.reporting.rows import kind_of, points_in
from mpitrain.system.files.folders import make_private

FOLDER = "tensorboard"
_FLUSH_S = 5


class TensorBoardLog:
    """The event file of this start of a run.

    Args:
        run_dir: of the run; resumed_at: accepted samples from which it goes on, 0 from the beginning; points beyond
            them that are there go away. None leaves all as they are.

    Raises:
        UsageError: the package does not work here.
    """

    place = FOLDER

    def __init__(self, run_dir: Path, resumed_at: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"log='tensorboard' cannot be written ({error}): pip install mpitrain[tensorboard]"
            ) from None
        folder = make_private(run_dir, FOLDER)
        purge = None
        if resumed_at is not None and any(folder.iterdir()):
            purge = resumed_at + 1 if resumed_at else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_S)

    def row(self, row: Mapping[str, Any]) -> None:
        """Every number of a row of progress under `train/`, every metric of a validation under `validation/`."""
        for name, value in points_in(row).items():
            self._writer.add_scalar(name, value, int(row["samples"]))
        if kind_of(row) == "validation":
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
