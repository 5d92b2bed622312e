"""Rows as an offline run of Weights & Biases in `RUN_DIR/wandb`: nothing goes over the network before `wandb sync`.

Invariants: every point carries the number of accepted samples, by which charts are drawn. An offline run cannot be
appended to, so a run that goes on is written anew, under the same id and without the rows beyond its checkpoint: the
newest folder holds the whole run, and replaces what was synchronized before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.reporting.rows import SETTINGS, Row, points_in
from mpitrain.system.files.folders import make_private

FOLDER = "wandb"
_ID_FILE = "mpitrain-run-id"
# No look at the terminal, the code, the repository or the processor; one that a version does not know is left out.
_SETTINGS = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_stats": True,
}  # fmt: skip


class WandbLog:
    """The offline run of this start.

    Args:
        run_dir: of the run; earlier: rows of earlier starts from which it goes on; is_new: the run begins here.
    """

    def __init__(self, run_dir: Path, earlier: list[Row], is_new: bool):
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        folder = make_private(run_dir, FOLDER)
        known = getattr(wandb.Settings, "model_fields", _SETTINGS)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mpitrain"),
            name=run_dir.resolve().name,
            id=_run_id(folder / _ID_FILE, is_new),
            dir=str(run_dir),
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(**{name: value for name, value in _SETTINGS.items() if name in known}),
        )
        self._exit_code = 1
        self._run.define_metric("*", step_metric="samples")
        for row in earlier:
            self._take(row)

    def row(self, row: Mapping[str, object]) -> None:
        """What a run is started with as its configuration; numbers by names such as `train/loss`."""
        if row["event"] == "start":
            self._run.config.update({name: row[name] for name in SETTINGS if name in row})
        self._take(row)
        if row["event"] == "end":
            self._exit_code = int(row["status"] not in ("ok", "requeue"))
            self._run.summary.update(
                {name: row[name] for name in ("status", "model", "failure") if row.get(name)}
            )

    def _take(self, row: Mapping[str, Any]) -> None:
        if points := points_in(row):
            self._run.log({"samples": int(row["samples"]), **points})

    def close(self) -> None:
        """Write what is left."""
        self._run.finish(exit_code=self._exit_code)


def _run_id(path: Path, is_new: bool) -> str:
    """The run's, kept for who goes on with it."""
    if is_new or not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
