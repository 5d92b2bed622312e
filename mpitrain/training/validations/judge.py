"""What `result.json` says of every run, on a cluster or in virtual time: whether it did what it was asked to, and what
that was.

Invariants: a failure outweighs a missed target, and a run that wants to be started again has no verdict on its targets
yet. The exit code follows from the two, and the status from the exit code. A model that holds NaN or an infinity is a
failure: gradients are looked at before they are used, and what an update rule makes of them is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpitrain.errors import EXIT_ERROR, EXIT_OK, EXIT_REQUEUE, EXIT_TARGET_MISSED
from mpitrain.job import Job, Overrides
from mpitrain.model.metrics import reduction
from mpitrain.model.wire.flat import all_finite
from mpitrain.reporting.targets import missed_targets

NOBODY_LEFT = "no worker was left to save and validate the model"
_STATUS = {EXIT_OK: "ok", EXIT_TARGET_MISSED: "missed", EXIT_REQUEUE: "requeue"}


def judge(
    job: Job,
    metrics: dict[str, float],
    failures: Sequence[str],
    overrides: Overrides,
    requeue: bool = False,
) -> dict[str, Any]:
    """The job, its metrics and the verdict on the run.

    Args:
        metrics: of the final model; failures: why the run has failed, the one to name first; none is none.
        overrides: what the command line has changed of the job.
        requeue: the run was asked to end, and wants to be started again.
    """
    requeue = requeue and not failures
    missed = {} if requeue else missed_targets(job.target, metrics)
    code = EXIT_ERROR if failures else EXIT_TARGET_MISSED if missed else EXIT_REQUEUE if requeue else EXIT_OK
    return {
        **metrics,
        "metrics": metrics,
        "metrics_reduction": reduction(job.metrics),
        "status": _STATUS.get(code, "fail"),
        "exit_code": code,
        "failure": failures[0] if failures else ", ".join(missed.values()),
        "target": dict(job.target),
        "target_missed": {name: job.target[name] for name in missed},
        **asked_for(job, overrides),
    }


def asked_for(job: Job, overrides: Overrides) -> dict[str, Any]:
    """How the run was asked for. `strategy_asked` is the text of the command line, `strategy` what it means."""
    return {
        "job": job.name,
        "strategy": str(job.strategy),
        "strategy_asked": overrides.strategy or str(job.strategy),
        "strategy_python": repr(job.strategy),
        "seed": job.seed,
        "batch_size": job.batch_size,
        "accumulate": job.accumulate,
        "precision": job.precision,
        "epochs": job.epochs,
        "synthetic": overrides.synthetic,
        "options": dict(job.options),
        "inject": [str(one) for one in overrides.injections],
    }


def divergence(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Why a trained model, or this rank's part of it, is of no use; empty if it is of use.

    Args:
        parameters: with their names. Frozen ones are not looked at: they are the user's own, and may hold infinities.
    """
    trained = {name: parameter.detach() for name, parameter in parameters if parameter.requires_grad}
    if all_finite(list(trained.values())):
        return ""
    bad = [name for name, tensor in trained.items() if not all_finite([tensor])]
    others = f" and {len(bad) - 1} more of {len(trained)} parameters" if len(bad) > 1 else ""
    return (
        f"training diverged: {bad[0]!r}{others} hold{'' if others else 's'} NaN or an infinity at the end; "
        "lower the learning rate, or clip gradients (clip_norm=1.0)"
    )
