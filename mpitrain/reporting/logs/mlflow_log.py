"""Rows as an MLflow run, in a file store in `RUN_DIR/mlflow`: nothing goes over the network.

Invariants: the step of a metric is the number of accepted samples. MLflow takes nothing back, so a run that goes on is
written anew, without the rows beyond its checkpoint, and what an earlier start has left is marked as deleted: the store
shows one run, and no step twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.reporting.rows import SETTINGS, Row, points_in
from mpitrain.system.files.folders import make_private

FOLDER = "mlflow"
_AT_ONCE = 500  # metrics in one call; MLflow allows 1000
_STATUS = {"ok": "FINISHED", "fail": "FAILED", "requeue": "SCHEDULED"}


class MlflowLog:
    """The run of this start.

    Args:
        run_dir: of the run; earlier: rows of earlier starts from which it goes on.
    """

    def __init__(self, run_dir: Path, earlier: list[Row]):
        # The store of files is the only one that needs no database, and MLflow 3 wants to be asked for it; it reports
        # its own use over the network unless it is told not to.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow.entities import Metric, ViewType
        from mlflow.tracking import MlflowClient

        self._metric, self._status = Metric, "FAILED"
        folder = make_private(run_dir.resolve(), FOLDER)
        self._client = MlflowClient(tracking_uri=folder.as_uri())
        name = run_dir.resolve().name
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        before = self._client.search_runs([experiment], run_view_type=ViewType.ACTIVE_ONLY)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        self._waiting: list[Any] = []
        for row in earlier:
            self._take(row)
        self._send()
        for one in before:
            self._client.delete_run(one.info.run_id)

    def row(self, row: Mapping[str, object]) -> None:
        """What a run is started with as parameters; numbers as metrics, by names such as `train/loss`."""
        if row["event"] == "start":
            for name in SETTINGS:
                if name in row:
                    self._client.log_param(self._run, name, row[name])
        self._take(row)
        self._send()
        if row["event"] == "end":
            self._status = _STATUS.get(str(row["status"]), "FAILED")
            for name in ("model", "failure"):
                if row.get(name):
                    self._client.set_tag(self._run, name, row[name])

    def _take(self, row: Mapping[str, Any]) -> None:
        now_ms = round(1e3 * float(row.get("virtual_s", row["t"])))
        for name, value in points_in(row).items():
            self._waiting.append(self._metric(name, value, now_ms, int(row["samples"])))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _AT_ONCE):
            self._client.log_batch(self._run, waiting[start : start + _AT_ONCE])

    def close(self) -> None:
        """Say how the run has ended."""
        self._client.set_terminated(self._run, self._status)
