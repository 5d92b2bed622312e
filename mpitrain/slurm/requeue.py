"""Whether a job that was asked to stop may run again: a bounded number of times, and only while it makes progress.

A job that was asked to stop before its ranks had begun, and one whose first node died, had no chance to make any: they
may run again a few times in a row without.

Invariants: progress is another newest checkpoint, by its accepted samples and the start that wrote it, with more of
them than that start had begun with, and time in which there was training: a start that was asked to end before it had
trained for a tenth of its time, such as one that has made a single step, counts as one without, of which a few in a row
are allowed. Every answer is kept in `restarts.jsonl` of the run directory, one line each, so that the next one can
compare. A torn line counts as no answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mpitrain.system.files.run_directory import Progress, progress, read_bounded, read_json

MARKER = "REQUEUE"
LOG = "restarts.jsonl"
_MAX_LOG_BYTES = 2**24
MAX_IN_A_ROW = 3  # restarts of runs that were not asked for a checkpoint, or had no time to train
LEAST_SHARE = 0.1  # of a start's time that it has trained
Cause = Literal["checkpointed", "not started", "node died"]
_WHY: dict[Cause, str] = {
    "checkpointed": "",
    "not started": "it was asked to end before its ranks had begun",
    "node died": "the node of its batch script died",
}


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
    if not is_answer:
        return None
    read = {"attempt": "", "reason": "", "cause": "checkpointed", "share_trained": None, **found}
    if not isinstance(read["share_trained"], float):
        read["share_trained"] = None
    return read


def _share_trained(run_dir: Path) -> float | None:
    """Of the last start's time; None if that is not known."""
    result = read_json(run_dir / "result.json") or {}
    trained_s, wall_s = result.get("train_s"), result.get("wall_s")
    if not isinstance(trained_s, int | float) or not isinstance(wall_s, int | float) or wall_s <= 0:
        return None
    return round(trained_s / wall_s, 3)


def may_requeue(run_dir: Path, max_restarts: int = 20, cause: Cause = "checkpointed") -> Answer:
    """Decide, and write the decision down. Restarts by Slurm itself, or by hand, count as well (SLURM_RESTART_COUNT).

    Args:
        cause: why it should; "checkpointed": the ranks have written `MARKER`.
    """
    here, earlier, share = progress(run_dir), restarts(run_dir), _share_trained(run_dir)
    count = max(len(earlier), _counted_by_slurm())
    if cause == "checkpointed":
        before = [(one["samples"], str(one["attempt"])) for one in earlier if one["cause"] == cause]
        shares = [one["share_trained"] for one in earlier if one["cause"] == cause]
        answer = decide(here, before, max_restarts, count, [*shares, share])
        if not (run_dir / MARKER).exists():
            return Answer(False, f"{run_dir} has no {MARKER}: the run has ended by itself")
    else:
        since = [one for one in earlier if (one["samples"], one["attempt"]) == (here.samples, here.attempt)]
        answer = decide_without_checkpoint(cause, [str(one["cause"]) for one in since], max_restarts, count)
    line = {
        "again": answer.again,
        "reason": answer.reason,
        "samples": here.samples,
        "attempt": here.attempt,
        "cause": cause,
        "share_trained": share,
    }
    try:
        _append(run_dir / LOG, json.dumps(line | {"time": time.time()}))
    except OSError as error:
        return Answer(
            False, f"{run_dir / LOG} cannot be written: {error.strerror}; free space, then submit it again"
        )
    return answer


def _counted_by_slurm() -> int:
    text = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _append(path: Path, line: str) -> None:
    with path.open("a+b") as log:
        torn = log.seek(0, 2) > 0 and (log.seek(-1, 2), log.read(1))[1] != b"\n"
        log.write(b"\n" * torn + line.encode() + b"\n")


def decide(
    here: Progress,
    before: list[tuple[int, str]],
    max_restarts: int,
    count: int | None = None,
    shares: Sequence[float | None] = (),
) -> Answer:
    """The rule alone.

    Args:
        here: the newest checkpoint; before: samples and start of what it was at each restart so far.
        count: restarts so far, where there were others, too.
        shares: of its time that each start has trained, this one last.
    """
    samples, count = here.samples, len(before) if count is None else count
    if count >= max_restarts:
        return Answer(False, f"it has been restarted {count} times, at most {max_restarts} are allowed")
    if samples < 0:
        return Answer(False, "there is no checkpoint to go on from")
    if before and (not here.gets_on or (samples, here.attempt) == before[-1]):
        return Answer(False, f"no progress since the last restart: still {samples} samples")
    last = shares[-1 - MAX_IN_A_ROW :]
    if len(last) > MAX_IN_A_ROW and all(share is not None and share < LEAST_SHARE for share in last):
        return Answer(
            False,
            f"the last {len(last)} starts have trained for less than {100 * LEAST_SHARE:g} % of their time, up to "
            f"{samples} samples: ask for more time",
        )
    return Answer(True, f"restart {count + 1} of at most {max_restarts}, from {samples} samples")


def decide_without_checkpoint(
    cause: Cause, before: list[str], max_restarts: int, count: int | None = None
) -> Answer:
    """The rule for a run that was not asked for a checkpoint.

    Args:
        before: causes of the restarts since the newest checkpoint was written.
        count: restarts so far, those before that checkpoint included.
    """
    count = len(before) if count is None else count
    if count >= max_restarts:
        return Answer(False, f"it has been restarted {count} times, at most {max_restarts} are allowed")
    vain = 0
    for one in reversed(before):
        if one == "checkpointed":
            break
        vain += 1
    if vain >= MAX_IN_A_ROW:
        return Answer(
            False,
            f"{_WHY[cause]}, and {vain} restarts before this one came no further: ask for more time, or see what the "
            "job's log says of its start",
        )
    return Answer(True, f"restart {count + 1} of at most {max_restarts}: {_WHY[cause]}")
