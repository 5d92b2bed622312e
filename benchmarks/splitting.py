"""Does it pay to split a model that one process could train? jobs/charnn.py, by turns.

    mpitrain launch -n 2 benchmarks/splitting.py [--rounds 15] [--steps 11]

The global batch is 32 samples for everybody, one torch thread a rank. Ways:

    one process      rank 0 alone with torch's own loop: what two ranks could halve
    allreduce        whole models, half a batch each: what to use where the model fits
    sharded          half the parameters and optimizer state each
    pipeline(M=...)  half the layers each, a batch in M microbatches

The figure is samples per second without start-up and first steps, as a ratio to the one process of the same round;
idle is the measured share of each stage, bubble what the schedule alone would cost.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Command, Measurement

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.training.job_file import load_job

MEASUREMENT = Measurement(
    contestants=("torch's own loop in one process",),
    depends=(*TRAINING, "jobs/charnn.py"),
    figures=("ways.*.ratio",),
    commands=(Command("mpitrain launch -n 2 benchmarks/splitting.py", minutes=6),),
)

JOB = str(Path(__file__).resolve().parents[1] / "jobs" / "charnn.py")
BATCH = 32
WAYS = {
    "allreduce": (mt.AllReduce(), BATCH // 2),
    "sharded": (mt.Sharded(), BATCH // 2),
    "pipeline(M=2)": (mt.Pipeline(microbatches=2), BATCH),
    "pipeline(M=4)": (mt.Pipeline(microbatches=4), BATCH),
    "pipeline(M=8)": (mt.Pipeline(microbatches=8), BATCH),
}


def alone(job, steps):
    """Samples per second of torch's own loop, the first step left out."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    with job.synthetic.reader(job.synthetic.scan(), 0) as reader:
        for step in range(steps):
            batch = reader.batch(0, step * BATCH, BATCH)
            optimizer.zero_grad(set_to_none=True)
            job.loss(model, batch).backward()
            optimizer.step()
            if step == 0:
                began_s = time.perf_counter()
    return BATCH * (steps - 1) / (time.perf_counter() - began_s)


def train(job, way, steps):
    strategy, batch_size = WAYS[way]
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        return mt.train(
            job, strategy, synthetic=True, steps=steps, batch_size=batch_size, run_dir=directory, quiet=True
        )


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=11)
    options = parser.parse_args()
    runtime = start()
    assert runtime.size == 2, "start with 2 ranks"
    torch.set_num_threads(1)
    job = load_job(JOB)
    speeds = {"one process": [], **{way: [] for way in WAYS}}
    idle = {way: [] for way in WAYS}
    bubble = {
        way: strategy.bubble for way, (strategy, _) in WAYS.items() if isinstance(strategy, mt.Pipeline)
    }
    for _ in range(options.rounds):
        speeds["one process"].append(alone(job, options.steps) if runtime.rank == 0 else 0.0)
        runtime.barrier()
        for way in WAYS:
            result = train(job, way, options.steps)
            speeds[way].append(result["samples_per_second"])
            if way in bubble:
                idle[way].append(result["pipeline"]["idle_share"])
    if runtime.rank == 0:
        show(options, job, speeds, idle, bubble)
    runtime.finish()


def show(options, job, speeds, idle, bubble):
    rows = [("way", "samples/s", "ratio", "95 % interval", "idle by stage", "bubble")]
    ways = {}
    for way, values in speeds.items():
        ratio, low, high = median_ratio(values, speeds["one process"])
        shares = [statistics.median(stage) for stage in zip(*idle.get(way, []))]
        ways[way] = {"samples_per_second": statistics.median(values), "ratio": [ratio, low, high]}
        ways[way] |= {"idle_share": shares, "bubble": bubble.get(way)}
        told, bound = " ".join(f"{s:.2f}" for s in shares), f"{bubble[way]:.2f}" if way in bubble else ""
        rows.append(
            (way, f"{statistics.median(values):.0f}", f"{ratio:.2f}", f"{low:.2f} - {high:.2f}", told, bound)
        )
    numbers = sum(parameter.numel() for parameter in job.model().parameters())
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores; {numbers / 1e6:.2f} million parameters")
    print(table(rows), flush=True)
    row = {"rounds": options.rounds, "steps": options.steps, "num_parameters": numbers, "ways": ways}
    write_row("splitting", row)


if __name__ == "__main__":
    main()
