"""The end of a run on the rank that validates: the model is saved, and then measured.

Invariants: the model is on disk before it is measured, whatever comes of that.
"""

from __future__ import annotations

from typing import Any

from mpitrain.model import Replica
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.training.measure import MODEL_FILE, save_model
from mpitrain.training.session import Session
from mpitrain.training.validations.averaged_model import EMA_MODEL_FILE
from mpitrain.training.validations.judge import divergence


def save_final(session: Session, replica: Replica | PeerReplica) -> dict[str, Any]:
    """Save the model; returns what there is to report, before anything is measured, and why the run has failed if the
    model is of no use."""
    path = session.run_dir / MODEL_FILE
    metadata = {"strategy": str(session.strategy), "job": session.job.name or ""}
    module = replica.take_module()
    save_model(module, path, metadata)
    failure = divergence(module.named_parameters())
    ema = replica.updates.ema if isinstance(replica, PeerReplica) else None  # of workers the servers keep it
    if ema is not None:
        with ema.swapped():
            save_model(replica.take_module(), session.run_dir / EMA_MODEL_FILE, metadata)
        replica.take_module()
    return {"metrics": {}, "model": str(path), "failure": failure}
