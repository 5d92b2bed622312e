"""The time limit of a batch job, where its checkpoints take longer than its batch script expects.

The script asks for a checkpoint so many seconds before the limit (`MPITRAIN_LEAD_S`). A rank that has measured a longer
writing asks by itself, sooner: otherwise the limit would come in the middle of the last checkpoint.

Invariants: only inside a script that has named its lead and its limit; a limit that was moved since is not known, and
then at worst the run goes on in the next job. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

END_S = 30.0  # from the last checkpoint to the end of all ranks
_took_s = 0.0  # the longest so far


def checkpoint_took(seconds: float) -> None:
    """One was written by this process."""
    global _took_s
    _took_s = max(_took_s, seconds)


def is_near() -> bool:
    """Whether this rank has to ask for the last checkpoint now."""
    return needs_now(_took_s, time.time())


def needs_now(took_s: float, now_s: float, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a checkpoint that takes twice as long as the longest so far, and the end of all ranks, only just fit
    before the limit, while the script would ask later."""
    lead_s, end_s = (environ.get(name, "") for name in ("MPITRAIN_LEAD_S", "SLURM_JOB_END_TIME"))
    if not (lead_s.isdecimal() and end_s.isdecimal()):
        return False
    needed_s = 2 * took_s + END_S
    return needed_s > int(lead_s) and now_s > int(end_s) - needed_s
