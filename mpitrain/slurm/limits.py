"""How long before its time limit a job is asked for a checkpoint, and the shortest limit that makes sense.

Invariants: arithmetic, in Python for what is asked of sbatch, and in the batch script (`LIMIT`) for the limit that it
finds, which `sbatch --time` may have changed.
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


# This part of a script defines `put_off`, which its trap asks. Between @ are the numbers above.
LIMIT = """\
# Slurm signals @signal_s@ s before the limit. A limit that is shorter than this script was written for (a debug queue)
# would leave no time before that: then the last fifth of it is enough.
left=0 LEAD=@signal_s@
if [[ -z ${SLURM_JOB_END_TIME:-} && -n ${SLURM_JOB_ID:-} ]]; then # Slurm 22.05 sets neither, its scontrol knows both
    times=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -m 1 StartTime= || true)
    seconds() { date +%s -d "$(sed -n "s/.*$1=\\([^ ]*\\).*/\\1/p" <<<"$times")" 2>/dev/null; }
    if from=$(seconds StartTime) && to=$(seconds EndTime) && [[ $times == *EndTime=[0-9]* ]]; then
        export SLURM_JOB_START_TIME=$from SLURM_JOB_END_TIME=$to
    fi
fi
limit=$((${SLURM_JOB_END_TIME:-0} - ${SLURM_JOB_START_TIME:-0}))
if ((limit > 0 && limit < 5 * LEAD)); then LEAD=$((limit / 5 > @least_lead_s@ ? limit / 5 : @least_lead_s@)); fi
if ((limit > 0 && limit - LEAD < @least_s@)); then
    echo "nothing can be trained within a limit of $limit s, of which the last $LEAD s are for the checkpoint:" \\
        "ask for --time=@least_minutes@ or more" >&2
    exit 2
fi
export MPITRAIN_LEAD_S=$LEAD
put_off() { # whether this is Slurm's signal and comes too early: it is sent again in time
    local ran
    if ((now || limit <= 0 || LEAD == @signal_s@)); then return 1; fi
    left=$((SLURM_JOB_END_TIME - $(date +%s))) ran=$(($(date +%s) - SLURM_JOB_START_TIME))
    if ((left <= LEAD + 5 || left > @signal_s@ + 90)); then return 1; fi
    if ((left < @signal_s@ - 5 && ran > 90)); then return 1; fi
    echo "the limit of $limit s is short: asked to end $LEAD s before it, not now" >&2
    (sleep $((left - LEAD)) && kill -USR1 $$) </dev/null >/dev/null 2>&1 &
}
"""
