"""What the wall time of a run went to, over all its starts: kept in `spent.txt` of its directory, beside `legs.jsonl`.

    {"attempt": "871570ce", "began_s": 1795557905.1, "from": 0, "samples": 960, "seconds": {"training": 7.5, ...}}
    {"mark": 640, "training_s": 5.1}

A line of the first kind is a stretch: a start of the run, or what it does after it has gone back to fewer samples. Its
place is written over as time goes by, so that a kill loses a quarter of a second at most. A mark says how long a
stretch had trained when a checkpoint was taken.

Invariants: rank 0 writes. At every moment the seconds of a stretch add up to the time since it began, and those of a
run, with what lies between its stretches, to the time from its first start to its last word. What lies behind a start
that has come to its end, and of which nothing is done again, is no time of the run. Samples that are processed are
useful or redone. Nobody but the clock that is given is asked for the time.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.system import background
from mpitrain.system.files.run_directory import is_same_start, read_bounded
from mpitrain.system.optional import optional

FILE = "spent.txt"
LINE_BYTES = 512
WRITE_EVERY_S = 0.25
LONG = 5.0  # times as long as the mean between two reports of progress: somebody was waited for
LEAST_WAIT_S = 0.5
_MAX_BYTES = 2**26
PARTS = ("useful", "redone", "starting", "restart", "checkpoint", "validation", "waiting", "ending")
_KEPT = ("starting", "setting_up", "training", "checkpoint", "validation", "waiting", "ending")


@dataclass
class Stretch:
    """One stretch of a run.

    Attributes:
        first, samples: accepted ones at its begin and by now; marks: (samples, seconds of training by then).
        seconds: by what they went into.
    """

    attempt: str
    began_s: float
    first: int
    samples: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KEPT, 0.0))
    marks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        """When it was heard of last."""
        return self.began_s + sum(self.seconds.values())

    def training_s(self, samples: int) -> float:
        """Seconds of training until so many samples, between two marks in proportion."""
        points = sorted({(self.first, 0.0), *self.marks, (self.samples, self.seconds["training"])})
        before = max((one for one in points if one[0] <= samples), default=points[0])
        after = min((one for one in points if one[0] > samples), default=before)
        share = (samples - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[1] + share * (after[1] - before[1])


class TimeSpent:
    """The stretch under way, on rank 0. Threads may call it.

    Raises:
        OSError: the file cannot be written; later on that costs a warning.

    Args:
        run_dir: whose file goes on; attempt: id of the start.
        first: accepted samples that it goes on from; None: as many as the stretch before has come to.
        age_s: seconds for which its process has been starting.
        clock, calendar: seconds, monotonic and of the calendar.
    """

    def __init__(
        self, run_dir: Path, attempt: str, first: int | None, age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic, calendar: Callable[[], float] = time.time,
    ):  # fmt: skip
        self._path, self._clock, self._calendar = run_dir / FILE, clock, calendar
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._at_s, self._phase = clock(), "setting_up"
        if first is None:
            first = next((one.samples for one in reversed(read_spent(run_dir))), 0)
        self._begin_stretch(attempt, first, age_s)
        self._thread: threading.Thread | None = None

    def keep_writing(self) -> None:
        """Write from now on, until it is closed."""
        self._thread = background.start("spent", self._write_on)

    def _write_on(self) -> None:
        while not self._closed.wait(WRITE_EVERY_S):
            with optional(self._path):
                self.write()

    def close(self) -> None:
        """Write for the last time. May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            if self._thread is not None:
                self._thread.join(10.0)  # or the disk hangs
            with optional(self._path):
                self.write()

    def _begin_stretch(self, attempt: str, first: int, age_s: float) -> None:
        self.stretch = Stretch(attempt, self._calendar() - age_s, first, first)
        self.stretch.seconds["starting"] = age_s
        self._num_reports = 0
        with open(self._path, "ab") as file:
            file.write(b"\n")  # behind a line that a kill has torn
            self._place = file.tell()
        self.write()

    def begin(self, goes_on_from: int = 0) -> None:
        """The next step begins now: the first, or one after others were lost.

        Args:
            goes_on_from: accepted samples; where there were more, the run has gone back. 0: that is not known.
        """
        with self._lock:
            self._settle("waiting" if self._num_reports else "setting_up")
            if 0 < goes_on_from < self.stretch.samples:
                with optional(self._path):
                    self.write()
                    self._begin_stretch(self.stretch.attempt, goes_on_from, 0.0)
            self._phase = "training"

    def progress(self, samples: int) -> None:
        """A step has come to its end: so many samples were accepted in all."""
        with self._lock:
            self._settle(self._phase)
            self._num_reports += 1
            self.stretch.samples = samples

    def pause(self, part: str, seconds: float) -> None:
        """So much of the time since the last report went into a "checkpoint" or a "validation"."""
        with self._lock:
            seconds = max(0.0, min(seconds, self._clock() - self._at_s))
            self.stretch.seconds[part] += seconds
            self._at_s += seconds

    def mark(self) -> None:
        """A checkpoint is being taken of what the run has now."""
        with self._lock:
            one = (self.stretch.samples, self.stretch.seconds["training"])
            self.stretch.marks.append(one)
            with optional(self._path), open(self._path, "ab") as file:
                file.write(f"{json.dumps({'mark': one[0], 'training_s': one[1]})}\n".encode())

    def end(self) -> None:
        """There are no more steps."""
        with self._lock:
            self._settle("ending")
            self._phase = "ending"

    def write(self) -> None:
        """Bring it to disk as it is now.

        Raises:
            OSError: that cannot be done.
        """
        with self._lock:
            now_s, stretch = self._clock(), self.stretch
            seconds = dict(stretch.seconds)
            for part, more_s in self._split(self._phase, now_s - self._at_s):
                seconds[part] += more_s
            row = {"attempt": stretch.attempt, "began_s": stretch.began_s, "from": stretch.first}
            row |= {
                "samples": stretch.samples,
                "seconds": {part: round(one, 6) for part, one in seconds.items()},
            }
            line = json.dumps(row).ljust(LINE_BYTES - 1) + "\n"
            handle = os.open(self._path, os.O_WRONLY)
            try:
                os.pwrite(handle, line.encode(), self._place)
            finally:
                os.close(handle)

    def _settle(self, part: str) -> None:
        now_s = self._clock()
        for name, seconds in self._split(part, now_s - self._at_s):
            self.stretch.seconds[name] += seconds
        self._at_s = now_s

    def _split(self, part: str, gap_s: float) -> list[tuple[str, float]]:
        """What a gap between two reports went into: one that is long for this run was not all training."""
        if part != "training" or not self._num_reports:
            return [(part, gap_s)]
        mean_s = self.stretch.seconds["training"] / self._num_reports
        waited_s = gap_s - mean_s if gap_s > max(LEAST_WAIT_S, LONG * mean_s) else 0.0
        return [("training", gap_s - waited_s), ("waiting", waited_s)]


def read_spent(run_dir: Path) -> list[Stretch]:
    """All stretches, oldest first; lines that are torn or no lines of ours are left out."""
    try:
        lines = read_bounded(run_dir / FILE, _MAX_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    found: list[Stretch] = []
    for line in lines:
        try:
            row = json.loads(line)
            if "mark" in row:
                found[-1].marks.append((int(row["mark"]), float(row["training_s"])))
                continue
            seconds = {part: float(row["seconds"][part]) for part in _KEPT}
            if not all(0 <= one < math.inf for one in (*seconds.values(), float(row["began_s"]))):
                continue
            first, samples = int(row["from"]), int(row["samples"])
            found.append(Stretch(str(row["attempt"]), float(row["began_s"]), first, samples, seconds))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            continue
    return found


def goodput(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """What `result.json` says: seconds by part, whose sum is `wall_s`, samples that count and samples that were done
    again, and those that count by the second of wall time. Empty without a stretch."""
    if not stretches:
        return {}
    seconds, redone = dict.fromkeys(PARTS, 0.0), 0
    for number, one in enumerate(stretches):
        later = stretches[number + 1 :]
        kept_s = one.seconds["training"]
        if (until := min((other.first for other in later), default=one.samples)) < one.samples:
            kept_s = one.training_s(until) if until > one.first else 0.0
        seconds["useful"] += kept_s
        seconds["redone"] += one.seconds["training"] - kept_s
        for part in ("starting", "checkpoint", "validation", "waiting", "ending"):
            seconds[part] += one.seconds[part]
        if number == 0:
            seconds["starting"] += one.seconds["setting_up"]
            continue
        before = stretches[number - 1]
        again = "waiting" if is_same_start(one.attempt, before.attempt) else "restart"
        seconds[again] += one.seconds["setting_up"]
        if not before.seconds["ending"] or one.first < before.samples:
            seconds[again] += max(0.0, one.began_s - before.ended_s)
        redone += max(0, before.samples - one.first)
    useful, wall_s = stretches[-1].samples - stretches[0].first, sum(seconds.values())
    return {
        "wall_s": wall_s, "seconds": seconds, "samples_useful": useful, "samples_redone": redone,
        "samples_processed": useful + redone, "samples_per_second": useful / wall_s if wall_s else 0.0,
    }  # fmt: skip
