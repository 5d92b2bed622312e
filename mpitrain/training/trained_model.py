"""`mt.load(run_dir)`: the module that a run has trained, or an ensemble of several, in any Python process.

Invariants: it starts neither MPI nor torch.distributed, and the caller's random numbers stay as they are. The weights
fit the module exactly, or nothing is returned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.errors import EXIT_ERROR, EXIT_REQUEUE, UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.user_code import check_module
from mpitrain.options import settings_of
from mpitrain.system.files.folders import check_readable
from mpitrain.system.files.job_source import find_job
from mpitrain.system.files.run_directory import RUN_FILE, read_json
from mpitrain.training.ensembles.saved import holds_ensemble, load_ensemble
from mpitrain.training.job_file import load_job
from mpitrain.training.measure import MODEL_FILE
from mpitrain.training.resuming.fingerprint import file_digest
from mpitrain.training.resuming.initial_weights import WeightsFile, compare_weights, load_weights
from mpitrain.training.served_tables import load_tables
from mpitrain.training.trained.made_here import job_of
from mpitrain.training.validations.averaged_model import EMA_MODEL_FILE
from mpitrain.training.validations.best_model import BEST_MODEL_FILE
from mpitrain.values import nearest

RunDir = str | Path | Mapping[str, Any]  # the directory, or the result of the run
RESULT_FILE = "result.json"
FILES = {"last": MODEL_FILE, "best": BEST_MODEL_FILE, "ema": EMA_MODEL_FILE}
KEPT_BY = {
    "best": 'a job with keep_best="accuracy" (--keep-best accuracy) keeps one',
    "ema": "a job with ema=0.999 (--ema 0.999) keeps one",
}


def load(run_dir: RunDir, job: Job | str | Path | None = None, which: str = "last") -> nn.Module:
    """The trained module of a finished run, on the host and in evaluation mode.

    Args:
        run_dir: of the run, on a cluster or in virtual time, or what `mpitrain.train` has returned of it; or of what
            `mpitrain ensemble` has made.
        job: that makes the module, or its file; by default the job that this process has trained, or else the job file
            from which the run was started, which must not have changed since.
        which: "last", as training has left it, or "best", by the metric of the job's `keep_best`, or "ema",
            the moving average of its weights.

    Raises:
        UsageError: there is no run, it is not finished or has failed, its job file is gone or has changed, or the
            weights do not fit the job's model. The message says what to do.
    """
    return load_with_job(run_dir, job, which)[1]


def load_with_job(
    run_dir: RunDir, job: Job | str | Path | None = None, which: str = "last"
) -> tuple[Job, nn.Module]:
    """The job besides the module; all else is as with `load`."""
    if which not in FILES:
        raise UsageError(f"mpitrain.load: which={which!r}{nearest(which, list(FILES))}")
    folder = Path(run_dir["run_dir"] if isinstance(run_dir, Mapping) else run_dir)
    check_readable(folder)
    if holds_ensemble(folder):
        if which != "last":
            raise UsageError(f"{folder} is an ensemble, which has one model: leave out which={which!r}")
        return load_ensemble(folder, job, load_with_job)
    weights = folder / FILES[which]
    run, result = read_json(folder / RUN_FILE), read_json(folder / RESULT_FILE)
    if run is None and result is None:
        raise UsageError(
            f"{folder} holds no run: it has neither {RUN_FILE} nor {RESULT_FILE} (looked in {Path.cwd()}); give the "
            "directory that the run has printed as run_dir"
        )
    _check_finished(folder, result)
    if which != "last" and not weights.is_file():
        raise UsageError(f"the run in {folder} has kept no {which} model: {KEPT_BY[which]}")
    settings = settings_of((run or {}).get("options", {}))
    if job is None:
        job = job_of(result) or _job_file(folder, run or {})
    made_by = job if isinstance(job, Job) else load_job(str(job), settings)
    module = _make(made_by)
    file = WeightsFile(weights, "the model")
    if misfit := compare_weights(module, file):
        raise UsageError(
            f"the weights in {weights} do not fit the model of job {made_by.name or '?'}: {misfit}; pass "
            "the job that the run has trained: mpitrain.load(run_dir, job=...)"
        )
    load_weights(module, file)
    load_tables(folder, module)
    return made_by, module.eval()


def _make(job: Job) -> nn.Module:
    """A module of the job's, the caller's random numbers untouched; a copy where the job holds the module itself."""
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        made = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()
    return check_module(made).cpu()


def _check_finished(folder: Path, result: dict[str, Any] | None) -> None:
    weights = folder / MODEL_FILE
    if result is None or result.get("exit_code") == EXIT_REQUEUE:
        raise UsageError(
            f"the run in {folder} is not finished: it is under way, or ended before its end; go on with it by "
            f"`mpitrain train JOB --run-dir {folder} --resume auto`"
        )
    if result.get("exit_code") == EXIT_ERROR:
        raise UsageError(
            f"the run in {folder} has failed: {result.get('failure')}; what it held then may be in {weights}, which "
            "safetensors.torch.load_file reads"
        )


def _job_file(folder: Path, run: dict[str, Any]) -> str:
    """Where the job stands from which the run was started."""
    path = run.get("job_file") or run.get("made_in")
    if not path:
        raise UsageError(
            f"the run in {folder} was started from Python with a job that is no variable of a script; pass the job, "
            "mpitrain.load(run_dir, job=...), or on the command line --job FILE:NAME, a file that holds it, or a "
            "function that makes it, under this name"
        )
    try:
        file = find_job(str(path)).file
    except UsageError:
        raise UsageError(
            f"{path}, from which the run in {folder} was started, is gone; pass the job, or where its file lies now: "
            "mpitrain.load(run_dir, job=...)"
        ) from None
    if (run.get("job_sha256") or run.get("made_in_sha256")) not in (None, file_digest(file)):
        raise UsageError(
            f"{file} has changed since the run in {folder} was started, and its model may be another; if it is still "
            f'the same, pass the file itself: mpitrain.load(run_dir, job="{path}")'
        )
    return str(path)
