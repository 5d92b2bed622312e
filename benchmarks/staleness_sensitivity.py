"""How much does a PixelCNN lose by stale gradients, beside a classifier of the same images?

    python benchmarks/staleness_sensitivity.py [--jobs pixelcnn] [--epochs 10] [--rates 1 0.25] [--rounds 3]

Virtual time, one process a run, no MPI: `jobs/pixelcnn.py` and `jobs/digits.py` as they are (Adam, batches of 16, one
server, every gradient on arrival and in full), both on handwritten digits, for as many samples under any number of
workers. So N workers make the same number of updates, of gradients that are N - 1 updates old. Each at its job's own
rate and at a part of it; rounds are seeds, and figures medians over them. Of every run the validation loss of the
final model, and

    relative increase   the loss over that of one worker at the same rate, less 1
    lost                the share of what one worker learns that is not learned: (loss - loss of one worker) over (loss
                        of equal chances - loss of one worker); 0 is as good as one worker, 1 as bad as knowing nothing

A loss of images cannot fall below their entropy, and that of classes can fall to 0, so the first measure makes a
classifier look sensitive; the second one does not. Virtual results do not depend on the machine's load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from measuring.common import machine, make_parser, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement

import mpitrain as mt
from mpitrain.data.sources import load_source
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.training.job_file import load_job
from mpitrain.values import parse

MEASUREMENT = Measurement(
    contestants=("one worker",),
    depends=(*VIRTUAL, "jobs/digits.py", "jobs/pixelcnn.py"),
    keys=("job", "epochs", "rate"),
    figures=("workers.*.lost",),
    commands=(
        Command("python benchmarks/staleness_sensitivity.py --rounds 2", minutes=14, covers={"epochs": 10}),
        Command(
            "python benchmarks/staleness_sensitivity.py --rounds 1 --epochs 5",
            minutes=4,
            covers={"epochs": 5},
        ),
    ),
)

JOBS = {"digits": 10, "pixelcnn": 17}  # and of how many things one has to be chosen
COMPUTE = "shifted_exponential(0.5, 0.5)"


def run(name, workers, rate, seed, epochs, folder):
    """Validation loss, staleness and updates of one run; the loss is infinite where the run came to no end."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / f"{name}.py"))
    train, validate = (mt.Shards(f"{folder}/digits/{part}-*.h5") for part in ("train", "validate"))
    job = dataclasses.replace(job, data=train, validate=validate, target={}, validate_every="never")
    own_rate = job.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    with tempfile.TemporaryDirectory(dir=folder) as run_dir, contextlib.redirect_stdout(io.StringIO()):
        result = mt.simulate(
            job, mt.Async(), workers, parse(COMPUTE, "compute"), epochs=epochs, seed=seed,
            lr=rate * own_rate, run_dir=run_dir, quiet=True,
        )  # fmt: skip
    loss = result.get("validation_loss", math.inf)
    return {
        "loss": loss if math.isfinite(loss) else math.inf,
        "staleness": result["staleness_mean"],
        "updates": result["steps"],
        "samples": result["samples"],
    }


def judged(name, losses):
    """Relative increase and what is lost, by workers; the fewest of them are what the others are compared with."""
    alone, nothing = losses[min(losses)], math.log(JOBS[name])
    return {
        workers: {"increase": loss / alone - 1, "lost": (loss - alone) / (nothing - alone)}
        for workers, loss in losses.items()
    }


def show(name, rate, found, rows):
    for workers, one in found.items():
        measures = [f"{100 * one[key]:+.0f} %" for key in ("increase", "lost")]
        low, high = one["range"]
        rows.append(
            (name, f"{rate:g}", str(workers), f"{one['staleness']:.1f}", f"{one['loss']:.3f}",
             f"{low:.3f}-{high:.3f}", *measures)
        )  # fmt: skip


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 0.25], help="times the job's own rate"
    )
    parser.add_argument("--rounds", "--seeds", dest="rounds", type=int, default=3)
    options = parser.parse_args()
    began_s, rows = time.perf_counter(), [
        ("job", "rate x", "workers", "staleness", "loss", "range", "increase", "lost")
    ]  # fmt: skip
    print(f"{machine()['cpu']}; {options.rounds} seed(s), {options.epochs} epoch(s)", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="staleness-") as folder,
        ProcessPoolExecutor(
            os.cpu_count(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        pack(load_source("digits"), Path(folder) / "digits", PackOptions(0.2), source="digits")
        for rate in options.rates:
            for name in options.jobs:
                found = measured(name, rate, options, folder, pool)
                show(name, rate, found, rows)
                row = {"job": name, "rate": rate, "epochs": options.epochs, "rounds": options.rounds}
                write_row("staleness_sensitivity", {**row, "compute": COMPUTE, "workers": found})
                print(f"{name} at {rate:g}: {time.perf_counter() - began_s:.0f} s", flush=True)
    print("\n" + table(rows))


def measured(name, rate, options, folder, pool):
    """What all seeds find, by workers."""
    waiting = {
        workers: [
            pool.submit(run, name, workers, rate, seed, options.epochs, folder)
            for seed in range(options.rounds)
        ]
        for workers in options.workers
    }
    runs = {workers: [one.result() for one in every] for workers, every in waiting.items()}
    losses = {workers: statistics.median(one["loss"] for one in every) for workers, every in runs.items()}
    return {
        str(workers): {
            "loss": losses[workers],
            "range": [min(one["loss"] for one in every), max(one["loss"] for one in every)],
            "runs": every,
            "staleness": statistics.median(one["staleness"] for one in every),
            **judged(name, losses)[workers],
        }
        for workers, every in runs.items()
    }


if __name__ == "__main__":
    main()
