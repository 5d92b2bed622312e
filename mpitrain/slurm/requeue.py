"""Whether a job that was asked to stop may run again: a bounded number of times, and only while it makes progress.

Invariants: progress is another newest checkpoint, by its mark (accepted samples) and the start that wrote it, and
every answer is kept in `restarts.jsonl` of the run directory, one line each, so that the next one can compare. A torn
line counts as no answer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.system.run_directory import progress, read_bounded

MARKER = "REQUEUE"
LOG = "restarts.jsonl"
_MAX_LOG_BYTES = 2**24


class Answer(NamedTuple):
    """May the job run again, and why (not)."""

    again: bool
    reason: str


def restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The answers given so far that were yes, oldest first; lines that are torn are left out."""
    try:
        lines = read_bounded(run_dir / LOG, _MAX_LOG_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    return [answer for answer in map(_answer, lines) if answer and answer["again"]]


def _answer(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_answer = isinstance(found, dict) and isinstance(found.get("samples"), int) and "again" in found
    return {"attempt": "", "reason": "", **found} if is_answer else None


def may_requeue(run_dir: Path, max_restarts: int = 20) -> Answer:
    """Decide, and write the decision down."""
    here = progress(run_dir)
    before = [(one["samples"], str(one["attempt"])) for one in restarts(run_dir)]
    answer = decide((here.checkpoint_at, here.attempt), before, max_restarts)
    if not (run_dir / MARKER).exists():
        return Answer(False, f"{run_dir} has no {MARKER}: the run has ended by itself")
    line = {
        "again": answer.again,
        "reason": answer.reason,
        "samples": here.checkpoint_at,
        "attempt": here.attempt,
    }
    try:
        _append(run_dir / LOG, json.dumps(line | {"time": time.time()}))
    except OSError as error:
        return Answer(
            False, f"{run_dir / LOG} cannot be written: {error.strerror}; free space, then submit it again"
        )
    return answer


def _append(path: Path, line: str) -> None:
    with path.open("a+b") as log:
        torn = log.seek(0, 2) > 0 and (log.seek(-1, 2), log.read(1))[1] != b"\n"
        log.write(b"\n" * torn + line.encode() + b"\n")


def decide(here: tuple[int, str], before: list[tuple[int, str]], max_restarts: int) -> Answer:
    """The rule alone.

    Args:
        here: samples and start of the newest checkpoint, -1 without one.
        before: the same at each restart so far.
    """
    samples = here[0]
    if len(before) >= max_restarts:
        return Answer(False, f"it has been restarted {len(before)} times, at most {max_restarts} are allowed")
    if samples < 0:
        return Answer(False, "there is no checkpoint to go on from")
    if before and here == before[-1]:
        return Answer(False, f"no progress since the last restart: still {samples} samples")
    return Answer(True, f"restart {len(before) + 1} of at most {max_restarts}, from {samples} samples")
