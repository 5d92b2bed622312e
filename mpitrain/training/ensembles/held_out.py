"""The held-out part of a job's data, which nothing is chosen by: it is looked at when everything is chosen.

Invariants: no run measures it, so no run, setting or ensemble can be selected by it. That it cannot be measured ends
nothing: the choice stands, and the reason is said.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.data import Shards
from mpitrain.data.read.reader import Source
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.job import Job
from mpitrain.reporting.repetitions import over_repetitions
from mpitrain.reporting.targets import Choice
from mpitrain.system.files.run_directory import read_json
from mpitrain.training.trained_model import RESULT_FILE, load_with_job
from mpitrain.training.validations.validation import Measure


def source_of(job: Job, folder: Path, given: str | os.PathLike[str] | None = None) -> Source | None:
    """The held-out part: what is given now, or was given to the run, or what its job names; None where nothing does."""
    held = (read_json(folder / RESULT_FILE) or {}).get("held_out")
    text = given or (held.get("pattern") if isinstance(held, dict) else None)
    return Shards(str(text)) if text else job.test


def measured_of(
    job: Job, module: nn.Module, source: Source, device: torch.device | None = None
) -> dict[str, float]:
    """The job's metrics of a module on a source, as validation measures them."""
    there = dataclasses.replace(job, validate=source, target={})
    return Measure(there, module, source.scan(), device or torch.device("cpu"))()


def held_out_lines(
    folders: Sequence[Path], by: Choice | None, given: str | os.PathLike[str] | None
) -> list[str]:
    """What the runs of a setting give on the held-out part, for people; nothing where none is named.

    Args:
        by: what they were chosen by, which comes first.

    Raises:
        UsageError: the part that is given now cannot be read.
    """
    if given is not None:
        Shards(str(given)).scan()
    found: list[dict[str, float]] = []
    for folder in folders:
        if given is None and not (read_json(folder / RESULT_FILE) or {}).get("held_out"):
            continue
        try:
            found.append(_of_run(folder, by, given))
        except MpitrainError as error:
            return [f"the held-out part was not measured: {error}"]
    names = [by.metric] if by else []
    names += [name for one in found[:1] for name in one if name not in names]
    texts = []
    for name in names if found else ():
        values = [(number, one[name]) for number, one in enumerate(found) if name in one]
        mean, spread, _ = over_repetitions(values)
        if mean is not None:
            texts.append(f"{name} {mean:.6g}" + ("" if spread is None else f" +- {spread:.2g}"))
    return [f"held out: {', '.join(texts)}"] if texts else []


def _of_run(folder: Path, by: Choice | None, given: Any) -> dict[str, float]:
    """Of the model that the run was chosen by: the best one, where it has kept that by this metric."""
    best = (read_json(folder / RESULT_FILE) or {}).get("best") or {}
    which = "best" if by is not None and best.get("model") and best.get("metric") == by.metric else "last"
    job, module = load_with_job(folder, None, which)
    source = source_of(job, folder, given)
    if source is None:
        raise UsageError(f"the job of {folder} names no test= any more")
    return measured_of(job, module, source)
