"""The lines of MLPerf in `RUN_DIR/mllog.txt`: `:::MLLOG {...}`, as mlperf-logging writes and checks them.

Invariants: times are milliseconds since the Unix epoch on the rank that reports. A run that goes on keeps its one
`run_start`, and the lines beyond its checkpoint are dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.reporting.rows import kind_of, metrics_in
from mpitrain.reporting.targets import LOSS
from mpitrain.system.files.atomic import write_whole

MLLOG_FILE = "mllog.txt"
TOKEN = ":::MLLOG "
# What only a submitter knows, by the variables that the reference implementations read.
SUBMISSION = {
    "submission_org": ("MLPERF_SUBMISSION_ORG", "none"),
    "submission_platform": ("MLPERF_SUBMISSION_PLATFORM", "none"),
    "submission_division": ("MLPERF_SUBMISSION_DIVISION", "open"),
    "submission_status": ("MLPERF_SUBMISSION_STATUS", "research"),
    "submission_benchmark": ("MLPERF_SUBMISSION_BENCHMARK", ""),  # the job's name
}
_STATUS = {"ok": "success"}  # of a run that has met its targets


class MlLog:
    """The log of one run.

    Args:
        path: of the file. One that is there goes on, without the lines beyond `resumed_at` accepted samples (all stay
            where that is None); where the run begins, it is written anew.
        resumed_at: as of `open_logs`; last_step_s: when the last step was reported, in seconds since the Unix epoch.
        facts: `metric`, which is the accuracy, and lines by key.
    """

    def __init__(
        self,
        path: Path,
        resumed_at: int | None,
        last_step_s: Callable[[], float],
        facts: Mapping[str, object],
    ):
        self.path, self.place, self._last_step_s = path, path.name, last_step_s
        kept = [] if resumed_at == 0 else _kept(path, resumed_at)
        write_whole(path, "".join(f"{line}\n" for line in kept), tag=str(os.getpid()))
        self._goes_on = any(_key(line) == "run_start" for line in kept)
        self._file = path.open("a", encoding="utf-8")
        self._epoch, self._samples = _epoch_under_way(kept), 0
        self._begun_s = self._at_s = time.time()  # of the last line
        self._facts = {name: value for name, value in facts.items() if name != "metric"}
        self._metric = str(facts.get("metric") or LOSS)
        self._measured_at, self._train_samples = resumed_at or 0, 1

    def row(self, row: Mapping[str, Any]) -> None:
        """What MLPerf has lines for: the start, epochs, validations and the end."""
        self._samples = int(row.get("samples") or 0) if row["event"] != "start" else self._samples
        if row["event"] == "start":
            self._start(row)
        elif row["event"] == "progress":
            self._enter(int(row["epoch"]))
        elif kind_of(row) == "validation":
            self._validation(row)
        if row["event"] == "end" and row["status"] != "requeue":
            self._end(str(row["status"]))
        self._file.flush()

    def close(self) -> None:
        """Give the file back. May be called twice."""
        self._file.close()

    def _start(self, row: Mapping[str, Any]) -> None:
        self._train_samples = int(row["samples"])
        if self._goes_on:
            return
        self._put("init_start", None, "INTERVAL_START", at_s=self._begun_s)
        self._put("cache_clear", False)  # nobody clears the caches of the file system for a run
        for key, (variable, default) in SUBMISSION.items():
            self._put(key, os.environ.get(variable) or default or row.get("job") or "none")
        accumulate = int(row.get("accumulate") or 1)
        facts = {
            "global_batch_size": int(row["batch_size"]) * int(row["workers"]) * accumulate,
            "gradient_accumulation_steps": accumulate,
            "train_samples": row["samples"],
            **self._facts,
        }
        for key, value in facts.items():
            self._put(key, value)
        self._put("init_stop", None, "INTERVAL_END")
        self._put("run_start", None, "INTERVAL_START")

    def _enter(self, epoch: int) -> None:
        """Training is in this epoch: those before it are over. It began with the end of what came before, where that
        was no epoch."""
        if epoch > abs(self._epoch):
            at_s = time.time() if self._epoch > 0 else self._at_s
            self._leave(at_s)
            self._epoch = epoch
            self._put("epoch_start", None, "INTERVAL_START", {"epoch_num": epoch}, at_s)

    def _leave(self, at_s: float) -> None:
        if self._epoch > 0:
            self._put("epoch_stop", None, "INTERVAL_END", self._where(self._epoch), at_s)
        self._epoch = -abs(self._epoch)

    def _where(self, epoch: int) -> dict[str, Any]:
        return {"epoch_num": epoch, "samples_count": self._samples}

    def _validation(self, row: Mapping[str, Any]) -> None:
        """After so many epochs; of the final model, after all of them."""
        if "epoch" in row:
            epoch = int(row["epoch"])
        else:
            epoch = max(1, abs(self._epoch) + (self._epoch <= 0 and self._samples > self._measured_at))
        if epoch > abs(self._epoch):  # too short for a row of progress
            self._enter(epoch)
        last_s = max(self._last_step_s() or time.time(), self._at_s)
        if epoch == self._epoch and self._samples >= epoch * self._train_samples:  # else in the middle of it
            self._leave(last_s)
        where = self._where(epoch)
        self._put("eval_start", None, "INTERVAL_START", where, last_s)
        metrics = metrics_in(row)
        for name, value in metrics.items():
            if name == self._metric or self._metric not in metrics:
                self._put("eval_accuracy", value, metadata=where | {"metric": name})
        self._put("eval_stop", None, "INTERVAL_END", where)
        self._measured_at = self._samples

    def _end(self, status: str) -> None:
        self._leave(time.time())
        metadata = {"status": _STATUS.get(status, "aborted"), "samples_count": self._samples}
        self._put("run_stop", None, "INTERVAL_END", metadata)

    def _put(
        self, key: str, value: object, kind: str = "POINT_IN_TIME", metadata: Mapping[str, object] | None = None,
        at_s: float | None = None,
    ) -> None:  # fmt: skip
        self._at_s = time.time() if at_s is None else at_s
        line = {
            "namespace": "", "time_ms": int(1e3 * self._at_s), "event_type": kind, "key": key, "value": value,
            "metadata": dict(metadata or {}),
        }  # fmt: skip
        self._file.write(TOKEN + json.dumps(line) + "\n")


def _kept(path: Path, resumed_at: int | None) -> list[str]:
    """The lines that hold where a run goes on: without its end, and those of samples that come again."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        read = _read(line)
        samples = read.get("metadata", {}).get("samples_count")
        beyond = resumed_at is not None and samples is not None and samples > resumed_at
        if read and read["key"] != "run_stop" and not beyond:
            found.append(line)
    while found and _key(found[-1]) == "epoch_start":  # it begins anew
        found.pop()
    return found


def _read(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line.removeprefix(TOKEN)) if line.startswith(TOKEN) else {}
    except ValueError:  # torn by a crash
        return {}
    return found if isinstance(found, dict) and "key" in found else {}


def _key(line: str) -> str:
    return str(_read(line).get("key", ""))


def _epoch_under_way(lines: list[str]) -> int:
    """The number of the last epoch that these lines have begun, negative where they have ended it."""
    epoch = 0
    for line in lines:
        read = _read(line)
        if read.get("key") in ("epoch_start", "epoch_stop"):
            number = int(read["metadata"].get("epoch_num", 0))
            epoch = number if read["key"] == "epoch_start" else -number
    return epoch
