"""How what ranks exchange in collectives travels: by which algorithms, and with checksums or without.

Invariants: it is settled before a group is made, and all ranks settle the same, for their options are the same.
"""

from __future__ import annotations

from mpitrain.checkpoint import Checkpoint
from mpitrain.inject import Flip
from mpitrain.job import Overrides
from mpitrain.system.launched.ranks import Ranks


def settle_payloads(runtime: Ranks, overrides: Overrides, resume: Checkpoint | None) -> None:
    """Decide it for a run that goes on from this checkpoint, or begins."""
    plan = runtime.allreduce_plan
    plan.adopt(resume.about.get("allreduce") if resume else None)
    damages = any(isinstance(one, Flip) and one.what == "payload" for one in overrides.injections)
    runtime.payloads, plan.in_messages = None, overrides.checksums or damages
    if plan.in_messages:
        from mpitrain.mpi.process_group.checksums import PayloadChecks

        runtime.payloads = PayloadChecks(overrides.checksums)
