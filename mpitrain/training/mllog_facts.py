"""What the lines of MLPerf say of a job, and rows say to nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.job import Job
from mpitrain.reporting.listeners import MLLOG, read_logs
from mpitrain.strategies.base import Strategy

if TYPE_CHECKING:
    from mpitrain.data import Catalogue

_NUMBERS = {
    "float32": "fp32",
    "full": "fp32",
    "none": "fp32",
    "float16": "fp16",
    "bfloat16": "bfloat16",
    "int8": "int8",
}
_LARGEST_FIRST = ("fp32", "bfloat16", "fp16", "int8")


def mllog_facts(
    job: Job, lr: float | None, validation: Catalogue | None, job_file: str | None = None
) -> dict[str, Any]:
    """The facts for `MlLog`, where the job writes such a log, else none. `lr`: instead of the optimizer's own."""
    if MLLOG not in read_logs(job.log):
        return {}
    metric = job.best_by.metric if job.best_by else next(iter(job.target), None)
    found = {
        "seed": job.seed,
        "metric": metric,
        **_optimizer(job, lr),
        **_disclosed(job, job_file),
    }
    if validation is not None:
        found["eval_samples"] = validation.num_samples
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
            "opt_name": type(made).__name__.lower(),
            "opt_base_learning_rate": None if rate is None else float(rate),
        }
    return {}


def _disclosed(job: Job, job_file: str | None) -> dict[str, Any]:
    """Settings that MLPerf's rules from 6.1 on ask for; what is not known is left out."""
    strategy, precision = job.strategy or Strategy(), _NUMBERS[job.precision]
    found: dict[str, Any] = {
        "lowest_numerical_precision_in_linear": precision,
        "lowest_numerical_precision_in_attn": precision,
        "tensor_parallelism": strategy.parallel,
        "pipeline_parallelism": strategy.stages,
        "context_parallelism": 1,
        "expert_parallelism": 1,
        "micro_batch_size": max(1, job.batch_size // strategy.microbatches),
    }
    names = [_NUMBERS.get(one if isinstance(one, str) else one.name) for one in strategy.wires]
    known = [name for name in names if name is not None]
    if len(known) == len(names):  # of a codec there is no such word
        passed_on = [precision] if found["pipeline_parallelism"] * found["tensor_parallelism"] > 1 else []
        found["lowest_numerical_precision_in_comm"] = max(
            ["fp32", *known, *passed_on], key=_LARGEST_FIRST.index
        )
    if job_file is not None:
        found["config_filename"] = Path(job_file).name
    return found
