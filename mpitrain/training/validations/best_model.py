"""Which validation of a run was the best, the model that was measured there, and how many have brought nothing better.

Invariants: `best.json` and `model-best.safetensors` in the run directory are all that is kept, so whoever validates
next finds them: a rank that takes over, and a run that is resumed. A run that goes on from a checkpoint forgets the
validations beyond it that were not better; it comes to them again. A better one beyond it stays.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.reporting.report import write_json
from mpitrain.strategies.validation_policy import EVERY_EPOCH, ValidationCadence, ValidationPolicy
from mpitrain.system.files.run_directory import read_json

BEST_FILE, BEST_MODEL_FILE = "best.json", "model-best.safetensors"


class Validations(ValidationCadence):
    """When a run validates, and what follows from what is measured.

    Args:
        job: its `keep_best` and `patience`.
        run_dir: of the run.
        policy: as in `ValidationCadence`.
        informs: whether a scheduler goes by what is measured.
    """

    writes = True  # whether this rank keeps the files, where several judge the same figures

    def __init__(
        self, job: Job, run_dir: Path, policy: ValidationPolicy = EVERY_EPOCH, informs: bool = False
    ):
        super().__init__(policy, time.monotonic)
        self.job, self.run_dir, self.informs = job, run_dir, informs
        self.best_by, self.may_end, self.metric = job.best_by, job.patience is not None, job.goes_by
        self._found: dict[str, Any] | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The best validation so far, {"metric", "value", "samples"}, and the samples at those "since" then; without a
        value before the first."""
        if self._found is None:
            found = read_json(self.run_dir / BEST_FILE) if self.best_by else None
            metric = self.best_by.metric if self.best_by else ""
            same = found is not None and (found.get("metric"), found.get("less_is_better")) == self._key()
            self._found = (
                found if same and found else {"metric": metric, "value": None, "samples": -1, "since": []}
            )
        return self._found

    def adopt(self, record: dict[str, Any]) -> None:
        """Go on from another rank's record."""
        self._found = record

    def _key(self) -> tuple[str, bool]:
        assert self.best_by is not None
        return self.best_by.metric, self.best_by.less_is_better

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether so many validations have brought nothing better that the run is to end."""
        return self.job.patience is not None and len(self.record["since"]) >= self.job.patience

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse a metric to choose by, or for the scheduler to go by, that is not measured.

        Raises:
            UsageError: names it.
        """
        if self.informs and self.metric not in metrics:
            raise UsageError(
                f"scheduler_metric {self.metric!r}: validation reports no metric of that name; it reports "
                + ", ".join(sorted(metrics))
            )
        if self.best_by is not None and self.best_by.metric not in metrics:
            raise UsageError(
                f"keep_best {self.best_by.metric!r}: validation reports no metric of that name; it reports "
                + ", ".join(sorted(metrics))
            )

    def take_metrics(
        self, metrics: Mapping[str, float], samples: int, save: Callable[[Path, dict[str, str]], None]
    ) -> None:
        """Judge what was measured after so many accepted samples.

        Args:
            save: writes the model that was measured to a path, with metadata; called where it is to be kept, on all
                ranks that judge the same figures.

        Raises:
            UsageError: as `check`.
        """
        self.check(metrics)
        if self.best_by is None:
            return
        metric, less_is_better = self._key()
        value, record = float(metrics[metric]), self.record
        if self.best_by.is_better(value, record["value"]):
            self._found = {
                "metric": metric, "less_is_better": less_is_better, "value": value, "samples": samples, "since": [],
            }  # fmt: skip
            if self.job.keep_best is not None:
                metadata = {"job": self.job.name or "", "metric": metric, "value": repr(value)}
                save(self.run_dir / BEST_MODEL_FILE, metadata | {"samples": str(samples)})
        elif samples > record["samples"]:  # or else it has been counted before
            record["since"] = sorted({*record["since"], samples})
        if self.writes:
            write_json(self.run_dir / BEST_FILE, {"less_is_better": less_is_better, **self.record})

    def result(self) -> dict[str, Any]:
        """What `result.json` says of it."""
        if self.best_by is None:
            return {}
        record = self.record
        path = self.run_dir / BEST_MODEL_FILE
        kept = str(path) if self.job.keep_best is not None and record["value"] is not None else None
        return {
            "best": {
                "metric": record["metric"], "value": record["value"], "samples": record["samples"],
                "validations_since": len(record["since"]), "model": kept,
            }
        }  # fmt: skip


def begin_from(run_dir: Path, source: Path | None, num_samples: int | None) -> None:
    """On one rank, before a run begins: what it knows of the best of its validations so far.

    Args:
        source: the run directory that it goes on from; num_samples: accepted samples there, None from the beginning.
    """
    if num_samples is None or source is None:
        for name in (BEST_FILE, BEST_MODEL_FILE):
            (run_dir / name).unlink(missing_ok=True)
        return
    record = read_json(source / BEST_FILE)
    if record is None or "since" not in record:
        return
    if source.resolve() != run_dir.resolve():
        if record["samples"] > num_samples:  # that run has gone further than this one has come
            return
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source / BEST_MODEL_FILE, run_dir / BEST_MODEL_FILE)
    record["since"] = [samples for samples in record["since"] if samples <= num_samples]
    write_json(run_dir / BEST_FILE, record)
