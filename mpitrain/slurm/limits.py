"""How long before its time limit a job is asked for a checkpoint, and the shortest limit that makes sense.

Invariants: arithmetic. The batch script does the same with the limit that it finds, which `sbatch --time` may have
changed (`script_parts.LIMIT`).
"""

from __future__ import annotations

import re

from mpitrain.errors import UsageError

LEAST_LEAD_S = 30  # for a checkpoint, and the end of all ranks
LEAST_TRAIN_S = 90  # Slurm may signal a minute early, and the ranks have to start
LEAST_MINUTES = 2


def lead(limit_s: int, at_most_s: int) -> int:
    """Seconds before a limit (0: there is none): its last fifth, `at_most_s`."""
    if not limit_s:
        return at_most_s
    return min(at_most_s, max(LEAST_LEAD_S, limit_s // 5))


def seconds_of(time: str) -> int:
    """A limit as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; 0 is
    no limit.

    Raises:
        UsageError: it is none.
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time):
        raise UsageError(f"time={time!r}: minutes, hours:minutes:seconds or days-hours")
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
