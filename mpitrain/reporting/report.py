"""What a run reports: a progress line, `metrics.jsonl`, `result.json`, and the figure of merit.

Invariants: only rank 0 reports. The FOM line is the only thing on stdout; everything for eyes goes to
stderr, so that `mpitrain train ... | grep FOM` always works. `result.json` is written last, whole or not at
all: its presence *is* the claim that the run came to its end (under ULFM no exit
code says so). Reporting is cheap: a call inside the interval compares two floats and returns, without even
reading the loss off its device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mpitrain.errors import OutputError
from mpitrain.reporting.console import Console, date, short
from mpitrain.reporting.families import line_of
from mpitrain.reporting.fom import SILENT, fom_line, rate_per_worker
from mpitrain.reporting.goodput import shares_if_disturbed
from mpitrain.reporting.listeners import call, open_logs
from mpitrain.reporting.rows import METRICS_FILE, METRICS_SCHEMA
from mpitrain.system.files.atomic import write_durable
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.part_places import is_there
from mpitrain.system.files.run_directory import samples_of
from mpitrain.system.optional import reason
from mpitrain.system.saying import say
from mpitrain.system.time_spent import TimeSpent

# 3 called a missed target `fail`; 2 said `meetings`, `lead_max` and `workers_detail`, 1 also `metrics_are` for
# `metrics_reduction`
RESULT_SCHEMA = 4
# Between two rows of progress a fiftieth of the time so far goes by, at least the first of these.
_FIRST_ROWS_S, _ROWS_SHARE = 0.2, 0.02


def default_run_dir(name: str) -> Path:
    """Run directory when the user names none: `$MPITRAIN_RUN_DIR`, or a new `runs/NAME-DATE-TIME`.

    Call it on one rank and share the answer: two ranks may see two seconds.
    """
    if os.environ.get("MPITRAIN_RUN_DIR"):
        return Path(os.environ["MPITRAIN_RUN_DIR"])
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    stamped = Path("runs") / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    found, count = stamped, 1
    while found.exists():
        count += 1
        found = stamped.with_name(f"{stamped.name}-{count}")
    return found


def plain(value: object) -> Any:
    """`value` as strict JSON holds it: tensors and numpy scalars as numbers; NaN, infinity, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not isinstance(value, float) and hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write `content` with sorted keys, for people to read.

    After a crash `path` is the old file or the new one, never half of it.

    Raises:
        OutputError: the disk is full or not writable.
    """
    text = json.dumps(plain(content), indent=2, sort_keys=True, allow_nan=False)
    with writing(path):
        make_private(path.parent)  # the run's, which somebody may have removed
        write_durable(path, f"{text}\n".encode())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name this file in whatever fails in here.

    Raises:
        OutputError: the disk is full or not writable.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; free space, then go on from the newest checkpoint with "
            "--resume auto"
        ) from error


@dataclass(frozen=True)
class Reported:
    """Which run is reported, how often, and to whom.

    Args:
        run_dir: created if need be, readable by its owner only. `metrics.jsonl` is continued; an earlier
            `result.json` is kept under another name, so that it cannot be taken for this run's.
        total_samples: accepted samples the whole run will count, for the share done and the time left.
        quiet: nothing for eyes on `stream`; the files stay, and the FOM line, unless it is `SILENT`.
        stream: where progress and events go.
        interval_s: least time between two progress lines, and rows; unless given 1 s on a terminal and 5 s in a log,
            and rows come closer to one another at first, so that a run of seconds has a curve.
        num_epochs: shown as `epoch 2/5` where given.
        clock: seconds, monotonic.
        resumed_at: accepted samples from which the run goes on; None where a rank goes on reporting what another has
            begun.
        log_every: a row after every so many steps; None: as often as a line for eyes.
        logs: names of the logs that get the rows, too; callbacks: objects that do, as in `listeners.py`.
        facts: what a log says of the run that stands in no row; spent: is told how the run comes on.
    """

    run_dir: Path | str
    total_samples: int
    quiet: bool | str = False
    stream: TextIO | None = None
    interval_s: float | None = None
    num_epochs: int | None = None
    clock: Callable[[], float] = time.monotonic
    resumed_at: int | None = 0
    log_every: int | None = None
    logs: Sequence[str] = ()
    callbacks: Sequence[Any] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    spent: TimeSpent | None = None


class Report:
    """Rank 0's report of one run."""

    def __init__(self, of: Reported) -> None:
        self.of, self.run_dir = of, Path(of.run_dir)
        self._console = Console(sys.stderr if of.stream is None else of.stream, bool(of.quiet))
        usual_s = 1.0 if self._console.is_terminal else 5.0
        self._interval_s = usual_s if of.interval_s is None else of.interval_s
        make_private(self.run_dir)
        set_aside(self.run_dir / "result.json")
        self._metrics = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._schema = {"schema": METRICS_SCHEMA}  # on the first row of every start
        self._unwritten: set[str] = set()
        self._logs = open_logs(of.logs, self.run_dir, of.resumed_at, self._wall_of_step, of.facts)
        self._last_step = -1
        self._stepped_s: float | None = None
        self._checkpoints: deque[tuple[Path, tuple[str, ...]]] = deque()  # not known to be whole
        self._opened_s = of.clock()
        self._set_out()

    def begin(self, goes_on_from: int = 0, **fields: object) -> None:
        """The first step begins now: rates and the time left do not count what came before. A row without a line.

        Args:
            goes_on_from: accepted samples, where the run goes on from a state that says so.
        """
        self._set_out()
        if self.of.spent is not None:
            self.of.spent.begin(goes_on_from)
        planned = {"total_samples": self.of.total_samples, "epochs": self.of.num_epochs}
        self._write("training", plain({"samples": self._start[1], **planned, **fields}))

    def _set_out(self) -> None:
        self._start = self._row_at = self._line_at = (
            self.of.clock(),
            self.of.resumed_at or 0,
        )  # seconds, samples
        self._row_due_s = self._due_s = self._start[0] + self._interval_s
        if self.of.interval_s is None:
            self._row_due_s = self._start[0] + _FIRST_ROWS_S

    def _since_opened(self) -> float:
        return round(self.of.clock() - self._opened_s, 3)

    def progress(self, samples: int, step: int, epoch: int, loss: Any, **fields: object) -> None:
        """Say how far the run is; call it as often as you like.

        Args:
            samples: accepted samples so far.
            step: updates so far.
            epoch: the epoch under way, counted from 1.
            loss: a number or a one-element tensor, read only when a row is due.
            **fields: further numbers for the row and the line (say `staleness=1.5`).
        """
        now_s = self._stepped_s = self.of.clock()
        if self.of.spent is not None:
            self.of.spent.progress(samples)
        line_due = now_s >= self._due_s
        if self.of.log_every is None:
            row_due = line_due or now_s >= self._row_due_s
        else:
            row_due = self._is_due(step, self.of.log_every)
        if not (line_due or row_due):
            return
        row = {"step": step, "epoch": epoch, "samples": samples, "loss": loss}
        row = plain({**row, "samples_per_second": 0.0, **fields})
        if row_due:
            rate, self._row_at = _rate(self._row_at, now_s, samples), (now_s, samples)
            self._row_due_s = now_s + self._between_rows_s(now_s)
            self._write("progress", row | {"samples_per_second": round(rate, 1)})
        if not line_due:
            return
        self._report_checkpoints()
        rate, self._line_at = _rate(self._line_at, now_s, samples), (now_s, samples)
        self._due_s = now_s + self._interval_s
        of = f"/{self.of.num_epochs}" if self.of.num_epochs else ""
        text = f"step {step} epoch {epoch}{of} loss {short(row['loss'])} {rate:.0f} samples/s"
        text += "".join(f" {key} {short(row[key])}" for key in fields)
        self._console.progress(
            text,
            samples / self.of.total_samples if self.of.total_samples else None,
            self._left_s(samples, now_s),
        )

    def pause(self, part: str, seconds: float) -> None:
        """So much of the time since the last step went into this, such as "validation"."""
        if self.of.spent is not None:
            self.of.spent.pause(part, seconds)

    def _between_rows_s(self, now_s: float) -> float:
        if self.of.interval_s is not None:
            return self._interval_s
        return min(self._interval_s, max(_FIRST_ROWS_S, _ROWS_SHARE * (now_s - self._start[0])))

    def _wall_of_step(self) -> float:
        """When `progress` was called last, in seconds since the Unix epoch; 0 before the first call."""
        return 0.0 if self._stepped_s is None else time.time() - (self.of.clock() - self._stepped_s)

    def _is_due(self, step: int, every: int) -> bool:
        """Whether a multiple of `every` was passed since the step before."""
        before = step - 1 if self._last_step < 0 else self._last_step
        self._last_step = step
        return step // every > before // every

    def checkpoint(self, folder: Path, parts: Sequence[str]) -> None:
        """This rank has written its part of a checkpoint, all of whose parts are named. It is a row as soon as all are
        there. May be called by any thread."""
        self._checkpoints.append((folder, tuple(parts)))

    def _report_checkpoints(self) -> None:
        for folder, parts in list(self._checkpoints):
            whole = all(is_there(folder, part) for part in parts)
            if whole or not folder.exists():  # or there is a newer one
                self._checkpoints.remove((folder, parts))
            if whole:
                self._put("checkpoint", {"samples": samples_of(folder), "folder": str(folder)})

    def event(self, name: str, **fields: object) -> None:
        """Always a row and a line: `event("epoch 3", accuracy=0.951)` reads `epoch 3 accuracy 0.951`."""
        row = plain(fields)
        self._write(name, row)
        self._console.event(line_of(name, row, self._console.width))

    def finish(self, result: Mapping[str, Any]) -> None:
        """End the report: metrics to disk, then `result.json`, then the FOM line as the last line on stdout.

        Raises:
            ValueError: `result` makes no FOM line; then no `result.json` is written either.
        """
        if result.get("failure"):
            self._console.insist(f"mpitrain: {explained(str(result['failure']))}")
        line = "" if result["status"] == "requeue" else fom_line(result)  # what goes on has no figure yet
        self.close()
        more = {"samples_per_second_per_worker": rate_per_worker(result), "schema": RESULT_SCHEMA}
        write_json(self.run_dir / "result.json", {**result, **more})
        if line and self.of.quiet != SILENT:
            say(line)

    def close(self) -> None:
        """Give the terminal line and the metrics file back, with or without a result. May be called twice."""
        self._console.clear()
        if not self._metrics.closed:
            with self._guard(METRICS_FILE):
                self._metrics.flush()
                os.fsync(self._metrics.fileno())
            with contextlib.suppress(OSError):
                self._metrics.close()
        for log in self._logs:
            with self._guard(log.place):
                log.close()

    def _write(self, event: str, row: dict[str, Any]) -> None:
        self._report_checkpoints()
        self._put(event, row)

    def _put(self, event: str, row: dict[str, Any]) -> None:
        stamped = {"time": date(), "t": self._since_opened(), "event": event, **row}
        with self._guard(METRICS_FILE):
            self._metrics.write(json.dumps(stamped | self._schema, allow_nan=False) + "\n")
            self._schema = {}
            self._metrics.flush()  # whoever watches the file, or finds it after a crash, sees every row
        for log in self._logs:
            with self._guard(log.place):
                log.row(stamped)
        call(self.of.callbacks, stamped)

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Once for each file it is told what goes wrong: a run goes on without rows of its metrics."""
        try:
            yield
        except Exception as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                text = f"{self.run_dir / what} cannot be written ({reason(error)}); rows of it are lost"
                self._console.event(f"warning: {text}")

    def _left_s(self, samples: int, now_s: float) -> float | None:
        done = samples - self._start[1]
        if done <= 0 or not self.of.total_samples:
            return None
        return max(self.of.total_samples - samples, 0) * (now_s - self._start[0]) / done


def _rate(since: tuple[float, int], now_s: float, samples: int) -> float:
    """Samples per second since then."""
    return (samples - since[1]) / max(now_s - since[0], 1e-9)


def explained(failure: str) -> str:
    """Why a run has failed, with the way out where there is a common one."""
    if failure.endswith((" is nan", " is inf", " is -inf", "is not finite")):
        return (
            f"{failure}; lower the learning rate or clip gradients, or pass "
            'on_nonfinite="skip" to leave such steps out'
        )
    return failure


class NullReport:
    """What every rank but 0 reports: nothing."""

    def begin(self, goes_on_from: int = 0, **fields: object) -> None:
        """Nothing."""

    def progress(self, samples: int, step: int, epoch: int, loss: Any, **fields: object) -> None:
        """Nothing."""

    def pause(self, part: str, seconds: float) -> None:
        """Nothing."""

    def event(self, name: str, **fields: object) -> None:
        """Nothing."""

    def checkpoint(self, folder: Path, parts: Sequence[str]) -> None:
        """Nothing."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def report_end(report: Report | NullReport, result: Mapping[str, Any]) -> None:
    """Report how the run ended, what was measured, and where the model is."""
    fields = {"status": result["status"], "samples": result["samples"], **result["metrics"]}
    if "virtual_s" in result:
        fields["virtual_s"] = result["virtual_s"]
    if result["failure"]:
        fields["failure"] = explained(result["failure"])
    if shares := shares_if_disturbed(result.get("goodput", {})):
        report.event("wall time", **shares)
    report.event("end", **fields, model=result["model"])


def set_aside(path: Path) -> None:
    """Rename a file of an earlier start, such as `result.json` to `result-1.json`, `result-2.json`, ...: nothing is
    overwritten."""
    count = 1
    while path.with_name(f"{path.stem}-{count}{path.suffix}").exists():
        count += 1
    if path.exists():
        path.rename(path.with_name(f"{path.stem}-{count}{path.suffix}"))
