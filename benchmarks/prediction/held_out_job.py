"""The jobs of `held_out.py`: the repository's own of this name, on less data and with smaller models, so that two
cores can carry six workers.

PREDICTION_JOB names it, PREDICTION_DATA is the folder that holds the data of all jobs. A batch takes PREDICTION_BASE_S
seconds, give or take a tenth, from the beginning of its forward pass to that of its backward pass: the job's own
computing, and then a sleep ("emulated compute"). Ranking sends its table whole, for most rules send no rows.
"""

import importlib.util
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import mpitrain as mt

NAME = os.environ.get("PREDICTION_JOB", "cnn")
DATA = Path(os.environ.get("PREDICTION_DATA", "data"))
SIZES = {
    "CHARNN_HIDDEN": "64", "CHARNN_LAYERS": "2", "RANKING_ROWS": "4096", "RANKING_SPARSE": "0",
    "CNN_SAMPLES": "3000", "NMT_SAMPLES": "4000", "RANKING_SAMPLES": "8000",
}  # fmt: skip


class Course(NamedTuple):
    """How a job is trained.

    Args:
        metric, target: to be reached; batch: samples; rate: of learning; steps: of every worker; base_s: of a batch.
    """

    metric: str
    target: float
    batch: int
    rate: float
    steps: int
    base_s: float


JITTER = (
    0.1  # of a batch's time, to either side: six backward passes that begin at once would wait for two cores
)
COURSES = {
    "cnn": Course("accuracy", 0.35, 16, 3e-3, 80, 0.06),
    "charnn": Course("accuracy", 0.31, 8, 6e-3, 40, 0.1),
    "nmt": Course("words", 0.85, 32, 4e-3, 40, 0.1),
    "ranking": Course("gap_closed", 0.45, 32, 1e-2, 40, 0.08),
}


def _load(name: str):
    """The job file of that name, as a module."""
    os.environ.update(SIZES)
    path = Path(__file__).resolve().parents[2] / "jobs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"held_out_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


original = _load(NAME)
COURSE = COURSES[NAME]


def _halved(batch):
    """Images of half the size; other batches as they are."""
    return batch | {"x": batch["x"][..., ::2, ::2].contiguous()} if NAME == "cnn" else batch


def model():
    if NAME != "cnn":
        return original.job.model()
    *layers, last = original.model()
    return nn.Sequential(*layers, nn.Linear(last.in_features // 4, last.out_features))


def loss(model, batch):
    batch = _halved(batch)
    began_s = time.perf_counter()
    found = original.job.loss(model, batch)
    if model.training:
        base_s = float(os.environ.get("PREDICTION_BASE_S", COURSE.base_s)) * random.uniform(
            1 - JITTER, 1 + JITTER
        )
        time.sleep(max(0.0, base_s - (time.perf_counter() - began_s)))
    return found


def metrics(model, batch):
    batch = _halved(batch)
    if NAME != "nmt":
        return original.job.metrics(model, batch)
    wanted = batch["target"] != original.PAD
    return {"words": (original.logits(model, batch).argmax(dim=2) == batch["target"])[wanted].float().mean()}


job = replace(
    original.job,
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=COURSE.rate),
    data=mt.Shards(f"{DATA}/{NAME}/train-*.h5"),
    validate=mt.Shards(f"{DATA}/{NAME}/validate-*.h5"),
    metrics=metrics,
    predict=None,
    strategy=None,
    epochs=1000,
    batch_size=COURSE.batch,
    target={COURSE.metric: COURSE.target},
)
