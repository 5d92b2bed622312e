"""Which algorithm carries a run's allreduces: settled before the first step, put on record, and reported where a
user or another machine decides otherwise than before.

Invariants: every rank calls it when the groups of the run are there. Where links are measured, all groups measure
now, and every rank then knows what each has found, so that any rank's checkpoint holds all of it.
"""

from __future__ import annotations

import json

from mpitrain.mpi.allreduce_plan import AUTO
from mpitrain.reporting.report import write_json
from mpitrain.system.files.run_directory import RUN_FILE
from mpitrain.system.optional import optional
from mpitrain.training.session import Session


def settle_allreduce(session: Session) -> None:
    """Collective: measure what is to be measured, and write it to `run.json`."""
    runtime, plan = session.mpi, session.runtime.allreduce_plan
    if plan.setting() == AUTO and runtime.num_nodes > 1:
        for group in list(runtime.groups):
            group.transport()
        for measured in runtime.allgather(plan.state()["measured"]):
            plan.merge(measured)
    whole = max(runtime.groups, key=lambda group: int(group.size()))  # the first is of all ranks
    chosen = whole.transport()["allreduce"]
    if runtime.rank != 0:
        return
    path = session.run_dir / RUN_FILE
    with optional(f"{path} (how allreduces are carried)"):
        write_json(path, json.loads(path.read_text()) | {"allreduce": {**plan.state(), "chosen": chosen}})
    noted = plan.differences(session.resume.about.get("allreduce") if session.resume else None)
    if noted:
        session.report.event("allreduce", **noted)
