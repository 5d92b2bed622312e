"""How a launcher's exit code is read.

Invariants: Open MPI's and srun's say 128 more than the number of the signal that a rank has died of, as a shell does.
Hydra, MPICH's and Intel's, says the number itself, and mixes it with those of the ranks that it has killed then: what
ranks have reported goes before it. Standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from mpitrain.system.launched.rank_status import RankStatus

_USUAL = 4  # exit codes up to here are our own, and no rank dies of these signals as a rule


def code_of(flavour: str, code: int, statuses: Mapping[int, RankStatus]) -> int:
    """The exit code of a launch whose launcher has ended with `code` (-n: died of signal n itself)."""
    if code < 0:
        return 128 - code
    if flavour != "mpich" or code == 0:
        return code
    reported = [status.code for _, status in sorted(statuses.items()) if status.code]
    if reported:
        return code if code in reported else reported[0]
    if not _USUAL < code < 32:
        return code
    # a rank that aborts (6) while Hydra kills the others (9) looks like one that was told to end (15)
    asked = not statuses or any(status.asked for status in statuses.values())
    if code == signal.SIGTERM and not asked:
        return 128 + signal.SIGABRT
    return 128 + code
