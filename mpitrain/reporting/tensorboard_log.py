"""Event files for TensorBoard in `RUN_DIR/tensorboard`, by torch's own writer.

Invariants: the step of a point is the number of accepted samples, which means the same under every strategy and for any
number of workers. A run that goes on has TensorBoard drop the points beyond the checkpoint, so no step comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.reporting.rows import kind_of, metrics_in
from mpitrain.system.folders import make_private

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
        kind = kind_of(row)
        if kind not in ("progress", "validation"):
            return
        found = metrics_in(row)
        if kind == "progress":
            kind, found = "train", found | {name: row[name] for name in ("epoch", "virtual_s") if name in row}
        for name, value in found.items():
            if (number := _number(value)) is not None:
                self._writer.add_scalar(f"{kind}/{name}", number, int(row["samples"]))
        if kind == "validation":
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _number(value: Any) -> float | None:
    """The value as a number, if it is one; the file of rows holds those that are not finite as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    return float(value)
