"""What the lines of MLPerf say of a job, and rows say to nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.reporting.listeners import MLLOG, read_logs

if TYPE_CHECKING:
    from mpitrain.data import Catalogue
    from mpitrain.job import Job


def mllog_facts(job: Job, lr: float | None, validation: Catalogue | None) -> dict[str, Any]:
    """Fields for the row `start`, where the job writes such a log, else none. `lr`: instead of the optimizer's own."""
    if MLLOG not in read_logs(job.log):
        return {}
    metric = job.best_by.metric if job.best_by else next(iter(job.target), None)
    found = {"seed": job.seed, "metric": metric, **_optimizer(job, lr)}
    if validation is not None:
        found["validation_samples"] = validation.num_samples
    return {name: value for name, value in found.items() if value is not None}


def _optimizer(job: Job, lr: float | None) -> dict[str, Any]:
    """Its name and its rate, of the first group; empty where it cannot be made for a stand-in of the model."""
    import torch

    from mpitrain.training.measure import takes_names

    if isinstance(job.optimizer, Mapping):
        return {}
    parameters = {"weight": torch.nn.Parameter(torch.zeros(1, 1))}
    with contextlib.suppress(Exception):  # the user's function may ask for the model's own parameters
        given = list(parameters.items()) if takes_names(job.optimizer) else list(parameters.values())
        made = job.optimizer(given)
        rate = lr if lr is not None else made.param_groups[0].get("lr")
        return {
            "optimizer": type(made).__name__.lower(),
            "learning_rate": None if rate is None else float(rate),
        }
    return {}
