"""Whether a job that was told to stop may run again: a bounded number of times, and only while it gets on.

Law of this file: progress is the mark of the newest checkpoint folder (accepted samples, its name), and every answer
is kept in `restarts.jsonl` of the run directory, one line each, so that the next one can compare.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import NamedTuple

MARKER = "REQUEUE"
LOG = "restarts.jsonl"


class Answer(NamedTuple):
    """May the job run again, and why (not)."""

    again: bool
    reason: str


def progress(run_dir: Path) -> int:
    """Accepted samples at the newest checkpoint; -1 without one."""
    names = [path.name for path in (run_dir / "checkpoints").glob("*") if re.fullmatch(r"\d+", path.name)]
    return max(map(int, names), default=-1)


def restarts(run_dir: Path) -> list[dict[str, object]]:
    """The answers given so far that were yes, oldest first."""
    try:
        lines = (run_dir / LOG).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [answer for answer in map(json.loads, lines) if answer["again"]]


def may_requeue(run_dir: Path, max_restarts: int = 20) -> Answer:
    """Decide, and write the decision down."""
    answer = decide(progress(run_dir), [int(str(one["samples"])) for one in restarts(run_dir)], max_restarts)
    if not (run_dir / MARKER).exists():
        return Answer(False, f"{run_dir} has no {MARKER}: the run has ended by itself")
    line = {"again": answer.again, "reason": answer.reason, "samples": progress(run_dir), "time": time.time()}
    with (run_dir / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    return answer


def decide(samples: int, before: list[int], max_restarts: int) -> Answer:
    """The rule alone.

    Args:
        samples: at the newest checkpoint now, -1 without one.
        before: the same at each restart so far.
    """
    if len(before) >= max_restarts:
        return Answer(False, f"it has been restarted {len(before)} times, at most {max_restarts} are allowed")
    if samples < 0:
        return Answer(False, "there is no checkpoint to go on from")
    if before and samples <= before[-1]:
        return Answer(False, f"no progress since the last restart: still {samples} samples")
    return Answer(True, f"restart {len(before) + 1} of at most {max_restarts}, from {samples} samples")
