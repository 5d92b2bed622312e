"""Who else gets the rows of `metrics.jsonl`: logs that are named (`log=`), and callbacks of the user's own.

Invariants: a listener gets rows as they stand in the file, on the rank that reports, in the thread that trains. A log
that cannot be written costs rows of that log, with one warning; an exception in a callback is the user's, and ends the
run like one in the loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from mpitrain.errors import UsageError
from mpitrain.reporting.rows import METRICS_FILE, earlier_rows, kind_of
from mpitrain.values import nearest

CSV, MLLOG, TENSORBOARD, MLFLOW, WANDB = LOGS = ("csv", "mllog", "tensorboard", "mlflow", "wandb")
METHODS = {"progress": "on_step", "validation": "on_validation", "checkpoint": "on_checkpoint"}


class Log(Protocol):
    """Takes rows to a place of its own.

    Attributes:
        place: its name in the run directory.
    """

    place: str

    def row(self, row: Mapping[str, object]) -> None:
        """One row of `metrics.jsonl`; raises OSError where it cannot be written."""

    def close(self) -> None:
        """The report is over. May be called twice."""


def read_logs(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """The logs that `log=` names: one, several, or several with commas between them.

    Raises:
        UsageError: there is no such log.
    """
    given = [names] if isinstance(names, str) else list(names or ())
    found = [one.strip() for name in given for one in str(name).split(",")]
    for name in found:
        if name not in LOGS:
            raise UsageError(
                f"log={name!r}: choose {', '.join(LOGS[:-1])} or {LOGS[-1]}{nearest(name, list(LOGS))}"
            )
    return tuple(dict.fromkeys(found))


def check_installed(logs: Iterable[str]) -> None:
    """Refuse a log whose package is not there, before anything is trained.

    Raises:
        UsageError: says how to install it.
    """
    for name in logs:
        if name not in (CSV, MLLOG) and importlib.util.find_spec(name) is None:
            raise UsageError(f"log={name!r} needs the package {name}: pip install mpitrain[{name}]")


def open_logs(
    names: Iterable[str],
    run_dir: Path,
    resumed_at: int | None,
    last_step_s: Callable[[], float] = lambda: 0.0,
    facts: Mapping[str, object] | None = None,
) -> list[Log]:
    """The logs of this run.

    Args:
        resumed_at: accepted samples from which the run goes on, 0 from the beginning: rows of an earlier start beyond
            them are dropped. None goes on behind the rows that are there.
        last_step_s: when the last step was reported, in seconds since the Unix epoch; 0 before the first.
        facts: what `mllog` says of the run that stands in no row.
    """
    opened: list[Log] = []
    for name in names:
        if name == CSV:
            from mpitrain.reporting.logs.csv_log import CsvLog

            opened.append(CsvLog(run_dir / "metrics.csv", resumed_at))
        elif name == MLLOG:
            from mpitrain.reporting.mllog import MLLOG_FILE, MlLog

            opened.append(MlLog(run_dir / MLLOG_FILE, resumed_at, last_step_s, facts or {}))
        elif name == TENSORBOARD:
            from mpitrain.reporting.logs.tensorboard_log import TensorBoardLog

            opened.append(TensorBoardLog(run_dir, resumed_at))
        else:
            opened.append(_guarded(name, run_dir, resumed_at))
    return opened


def _guarded(name: str, run_dir: Path, resumed_at: int | None) -> Log:
    """A log that is written anew, with the rows so far, where a run goes on."""
    so_far = [] if resumed_at == 0 else earlier_rows(run_dir / METRICS_FILE, resumed_at)

    def make() -> Library:
        if name == MLFLOW:
            from mpitrain.reporting.logs.mlflow_log import MlflowLog

            return MlflowLog(run_dir, so_far)
        from mpitrain.reporting.logs.wandb_log import WandbLog

        return WandbLog(run_dir, so_far, resumed_at == 0)

    return GuardedLog(name, make)


def check_callbacks(callbacks: object) -> None:
    """Refuse what is not a sequence of objects with methods that a run calls.

    Raises:
        UsageError: names the object and what is wrong with it.
    """
    known = list(METHODS.values())
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise UsageError(
            f"Job: callbacks must be a list of objects with {', '.join(known)}, got {callbacks!r}"
        )
    for one in callbacks:
        name = type(one).__name__
        if isinstance(one, type):
            raise UsageError(
                f"Job: callbacks: {one.__name__} is a class; give an object of it, {one.__name__}()"
            )
        unknown = [word for word in dir(one) if word.startswith("on_") and word not in known]
        if unknown:
            raise UsageError(
                f"Job: callbacks: {name} has {unknown[0]!r}, which nothing calls{nearest(unknown[0], known)}"
            )
        if not any(callable(getattr(one, method, None)) for method in known):
            raise UsageError(f"Job: callbacks: {name} has none of the methods {', '.join(known)}")


def call(callbacks: Iterable[object], row: Mapping[str, object]) -> None:
    """Hand the row to the method of each callback that is for it."""
    name = METHODS.get(kind_of(row))
    for one in callbacks if name else ():
        method = getattr(one, str(name), None)
        if method is not None:
            method(dict(row))


# ---- A log by somebody else's library, which must not end a training: whatever it raises costs its rows, and no more.
#
# Invariants: the library is imported at the first row. After its first exception it is not called any more.


class Library(Protocol):
    """What a library's log does; anything may be raised."""

    def row(self, row: Mapping[str, object]) -> None:
        """One row of `metrics.jsonl`."""

    def close(self) -> None:
        """The report is over."""


class GuardedLog:
    """The log that `make()` makes, in `place` of the run directory."""

    def __init__(self, place: str, make: Callable[[], Library]):
        self.place, self._make = place, make
        self._log: Library | None = None
        self._is_broken = False

    def row(self, row: Mapping[str, object]) -> None:
        """One row; raises OSError at the first exception of the library."""
        if self._is_broken:
            return
        try:
            self._log = self._log or self._make()
            self._log.row(row)
        except Exception as error:
            self._is_broken = True
            raise OSError(_short(error)) from error

    def close(self) -> None:
        """The report is over. May be called twice."""
        log, self._log = self._log, None
        if log is None or self._is_broken:
            return
        try:
            log.close()
        except Exception as error:
            raise OSError(_short(error)) from error


def _short(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
