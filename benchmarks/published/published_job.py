"""The curves of `published.py` that need real gradients: a convnet on handwritten digits, in virtual time.

Invariants: one process without MPI, one torch thread. Every run gets its figures from the assumptions; nothing is
tuned here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from published_assumptions import CONVNET
from rates import PARTS, Parts, Whole

import mpitrain as mt
from mpitrain.data.sources import load_source
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.simulation.call import simulate
from mpitrain.strategies import Async, LocalSGD
from mpitrain.training.job_file import load_job
from mpitrain.virtual import ComputeLaw, Constant, Ideal, Link


@functools.cache
def digits() -> tuple[mt.Job, mt.Shards, mt.Shards]:
    """The job of `jobs/digits.py`, and training and validation data, packed into a folder that stays until the end."""
    folder = Path(digits_folder().name)
    pack(load_source("digits"), folder / "digits", PackOptions(0.2), source="digits")
    job = load_job(str(Path(__file__).parents[2] / "jobs" / "digits.py"))
    train, validate = (mt.Shards(f"{folder}/digits/{name}-*.h5") for name in ("train", "validate"))
    return job, train, validate


@functools.cache
def digits_folder() -> tempfile.TemporaryDirectory[str]:
    """Where data and runs are written."""
    return tempfile.TemporaryDirectory(prefix="published-")


def run(
    job: mt.Job, strategy: mt.Strategy, num_workers: int, *laws: Any, rate: float
) -> tuple[Any, list[tuple[float, float]]]:
    """One simulation: its result, and (virtual seconds, loss) of each of its validations."""
    folder = Path(tempfile.mkdtemp(dir=digits_folder().name))
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        result = simulate(job, strategy, num_workers, *laws, lr=rate, run_dir=str(folder), quiet=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marks = [
        (row.get("virtual_s", result["virtual_s"]), row["validation_loss"])
        for row in rows
        if "validation_loss" in row
    ]
    return result, marks


def num_parameters() -> int:
    """Of the convnet."""
    return sum(one.numel() for one in digits()[0].model().parameters())


def time_to_lowest(
    values: Mapping[str, float], law: ComputeLaw, num_servers: int, seed: int, epochs: int
) -> tuple[float, dict[str, Any]]:
    """Speed-up of the time to the lowest training loss that one worker and all of them reach.

    Args:
        law: of a worker's step, in seconds; num_servers: of the run with all workers.
        epochs: passes over the digits, the same for both.
    """
    job, train, _ = digits()
    batch = max(1, round(values["digits_batch"]))
    part = train.scan().num_samples // PARTS // batch * batch
    job = dataclasses.replace(
        job, optimizer=torch.optim.Adam, data=Parts(train, part), validate=Whole(train), target={},
        epochs=epochs * PARTS, batch_size=batch, seed=seed,
    )  # fmt: skip
    rate = values["link_gbit_per_s"] * num_parameters() / (values["parameters_million"] * 1e6)
    link = Link(rate, values["latency_s"])
    workers = CONVNET.num_workers
    found = [
        run(job, Async(), 1, law, Ideal(), rate=values["rate"])[1],
        run(job, Async(servers=num_servers), workers, law, link, rate=values["rate"])[1],
    ]
    goal = max(min(loss for _, loss in marks) for marks in found)
    seconds = [next(at_s for at_s, loss in marks if loss <= goal) for marks in found]
    curves = [[[round(at_s, 3), round(loss, 5)] for at_s, loss in marks] for marks in found]
    return seconds[0] / seconds[1], {"loss": goal, "seconds": seconds, "curves": curves}


def losses_by_period(values: Mapping[str, float], seed: int, periods: Sequence[int]) -> dict[int, float]:
    """Final validation loss of the averaged model, by the averaging period in steps."""
    job, train, validate = digits()
    job = dataclasses.replace(
        job, optimizer=torch.optim.SGD, data=train, validate=Whole(validate), target={},
        epochs=max(1, round(values["epochs"])), batch_size=max(1, round(values["digits_batch"])), seed=seed,
    )  # fmt: skip
    workers = max(1, round(values["workers"]))
    return {
        period: run(job, LocalSGD(period=period), workers, Constant(), Ideal(), rate=values["rate"])[0][
            "validation_loss"
        ]
        for period in periods
    }


def over_shortest(losses: Sequence[Mapping[int, float]]) -> tuple[float, bool, dict[str, float]]:
    """Of runs with several seeds: the larger of the losses at periods 10 and 20 over that at 1, whether the loss at 100
    is larger than either, where there is one, and the median losses by period.
    """
    middle = {period: statistics.median(one[period] for one in losses) for period in losses[0]}
    shorter = max(middle[10], middle[20])
    return (
        shorter / middle[1],
        middle.get(100, math.inf) > shorter,
        {str(key): value for key, value in middle.items()},
    )
