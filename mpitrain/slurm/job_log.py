"""`job.log` of a run directory: what its batch job has done so far, a line each, written by the batch script.

    SECONDS JOB_ID RESTARTS EVENT WORDS...      1795557958 7 0 requeued by n2: the first node n1 is down

Invariants: it is only appended to, and a line that is torn or no line of ours is left out.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

from mpitrain.system.files.run_directory import read_bounded

FILE = "job.log"
_MAX_BYTES = 2**24
_LINE = re.compile(r"(\d{1,12}) (\d{1,20}) (\d{1,9}) ([a-z]+)(?: (.*))?")


class JobEvent(NamedTuple):
    """One line: when, in seconds since 1970; how often the job had been started again; what, and about what."""

    at_s: int
    job: str
    restarts: int
    name: str
    words: str


def read_events(run_dir: Path) -> list[JobEvent]:
    """All lines, oldest first; empty where there are none."""
    try:
        text = read_bounded(run_dir / FILE, _MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return []
    found = [_LINE.fullmatch(line) for line in text.split("\n")]
    return [JobEvent(int(m[1]), m[2], int(m[3]), m[4], m[5] or "") for m in found if m]


def append_event(run_dir: Path, job: str, event: str) -> None:
    """Add a line.

    Raises:
        OSError: it cannot be written.
    """
    with (run_dir / FILE).open("a", encoding="utf-8") as log:
        log.write(f"{time.time():.0f} {job} 0 {event}\n")
