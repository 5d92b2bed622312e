"""Which remedy for stale gradients reaches the digits target soonest, and at how many learning rates?

    python benchmarks/rates.py [--workers 16 32] [--seeds 3] [--exponents -5 6] [--epochs 20]

Virtual time, one process, no MPI: 16 and 32 virtual workers with seeded times of computing, an ideal network,
the job of `jobs/digits.py` with its own optimizer. Five ways to use one server, each swept over the same grid
of learning rates, factor 2 apart, around the job's own rate:

    async               every gradient on arrival, in full
    async inverse       every gradient on arrival, worth 1/tau
    softsync            the mean of S = workers / 4 gradients, in full
    softsync inverse    the mean of S gradients, each worth 1/tau: the combination of Zhang et al., IJCAI 2016
    async matched       async at the grid's rates / (N - 1)

The last is the control. Softsync with 1/tau moves the model by rate / (S * tau) a gradient, tau is
(N - 1) / S in the mean (`reference/algorithms.md` section 4), so its effective rate is rate / (N - 1), and so
is that of async with 1/tau; what either gains beyond plain async at *that* rate is not merely a smaller step.

A rate works when every seed reaches the target within the job's own number of epochs; when one misses it, no
further seed is run, and a run that is below half of the goal after half of its samples is broken off. The
target is looked at every quarter of an epoch, on the parameters that the first worker then holds. A way is
judged at its best rate (median of the seeds), and by the range of those that work: no single favourable rate.
Virtual results do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import machine, table, write_row

import mpitrain as mt
from mpitrain.data.pack import PackOptions, pack
from mpitrain.data.sources import load_source
from mpitrain.job import load_job
from mpitrain.simulation import simulate
from mpitrain.targets import read_target
from mpitrain.text import parse
from mpitrain.training.measure import build

PARTS, SPLIT = 4, 4
COMPUTE = "shifted_exponential(0.5, 0.5)"
BEST = "softsync inverse"
MATCHED = "async matched"


def ways(num_workers):
    """Strategy of each contestant, and the factor on the grid's rates."""
    updates = max(1, num_workers // SPLIT)
    return {
        "async": ("async()", 1.0),
        "async inverse": ("async(damping=inverse())", 1.0),
        "softsync": (f"softsync(updates={updates})", 1.0),
        BEST: (f"softsync(updates={updates}, damping=inverse())", 1.0),
        MATCHED: ("async()", 1.0 / (num_workers - 1)),
    }


class Settled(Exception):
    """The target was met at the validation before, or is out of reach: this run teaches nothing more."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """A source whose epoch is one part of `source`'s epoch, so that validation comes that much more often."""

    source: mt.Shards
    num_samples: int  # of a part: whole batches

    def scan(self):
        found = self.source.scan()
        shard = dataclasses.replace(found.files[0], num_samples=self.num_samples)
        return dataclasses.replace(found, files=(shard,))

    def reader(self, catalogue, seed):
        return PartReader(self, self.source.reader(self.source.scan(), seed))


class PartReader:
    """Epoch e of the parts is part e % PARTS of epoch e // PARTS."""

    def __init__(self, parts, reader):
        self.parts, self.inner = parts, reader

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.inner.close()

    def batch(self, epoch, start, count):
        whole, part = divmod(epoch, PARTS)
        return self.inner.batch(whole, part * self.parts.num_samples + start, count)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A source that hands out all its samples as one batch: validation measures once."""

    source: mt.Shards

    def scan(self):
        return self.source.scan()

    def reader(self, catalogue, seed):
        return self

    def sequential(self, batch_size):
        yield everything(self.source)


@functools.cache
def everything(source):
    with source.reader(source.scan(), 0) as reader:
        return next(iter(reader.sequential(source.scan().num_samples)))


def digits(folder, num_epochs):
    """The main job on shards of ours, validated every quarter of an epoch."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "digits.py"))
    train, validate = (mt.Shards(f"{folder}/digits/{name}-*.h5") for name in ("train", "validate"))
    part = train.scan().num_samples // PARTS // job.batch_size * job.batch_size
    return dataclasses.replace(
        job, data=Parts(train, part), validate=Whole(validate), epochs=num_epochs * PARTS
    )


def settling(job):
    """The job, breaking itself off as soon as its end is known: at the validation after the one that settled it,
    which is on record by then.
    """
    target, marks = read_target(*next(iter(job.target.items()))), []

    def metrics(model, batch):
        hopeless = len(marks) >= job.epochs / 2 and max(marks) < target.bound / 2
        if marks and (target.met(marks[-1]) or hopeless):
            raise Settled
        found = job.metrics(model, batch)
        marks.append(float(found[target.metric]))
        return found

    return dataclasses.replace(job, metrics=metrics)


def run(job, strategy, num_workers, rate, seed, folder):
    """One run: where it reached the target (None: it did not), and the best that it saw."""
    target, folder = read_target(*next(iter(job.target.items()))), Path(tempfile.mkdtemp(dir=folder))
    name = target.metric
    with contextlib.suppress(Settled), contextlib.redirect_stdout(io.StringIO()):
        simulate(
            settling(dataclasses.replace(job, seed=seed)), parse(strategy, "strategy"), num_workers,
            parse(COMPUTE, "compute"), lr=rate, run_dir=str(folder), quiet=True,
        )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marks = [row for row in rows if name in row]
    hit = next((row for row in marks if target.met(row[name])), None)
    found = {"seed": seed, "best": max((row[name] for row in marks), default=0.0)}
    return found | {"samples": hit and hit["samples"], "virtual_s": hit and hit["virtual_s"]}


def sweep(job, strategy, num_workers, rates, options, folder):
    """Runs by rate; a rate whose run missed the target gets no further seed."""
    found = {}
    for rate in rates:
        found[rate] = []
        for seed in range(options.seeds):
            found[rate].append(run(job, strategy, num_workers, rate, seed, folder))
            if found[rate][-1]["samples"] is None:
                break
    return found


def judge(found, own_rate):
    """The best rate of a sweep with its figures, and the range of the rates that work."""
    works = [rate for rate, runs in found.items() if all(run["samples"] is not None for run in runs)]
    judged = {"works": [rate / own_rate for rate in works], "num_rates": len(found)}
    if not works:
        return judged
    best = min(works, key=lambda rate: statistics.median(run["virtual_s"] for run in found[rate]))
    return judged | {"best_rate": best / own_rate, "runs": found[best]}


def line_of(name, judged):
    """A row of the table, at most 80 columns with its neighbours."""
    if not judged["works"]:
        return (name, "-", "missed", "-", "-", f"0/{judged['num_rates']}", "-")
    samples, virtual_s = ([run[key] for run in judged["runs"]] for key in ("samples", "virtual_s"))
    low, high = min(judged["works"]), max(judged["works"])
    return (
        name, f"x{judged['best_rate']:.3g}", f"{statistics.median(samples):.0f}",
        f"{min(samples)}-{max(samples)}", f"{statistics.median(virtual_s):.1f}",
        f"{len(judged['works'])}/{judged['num_rates']}", f"x{low:.3g}-{high:.3g}",
    )  # fmt: skip


def contest(job, own_rate, num_workers, options, folder):
    """Every way over its grid; prints the table and writes the row."""
    low, high = options.exponents
    grid = [own_rate * 2.0**exponent for exponent in range(low, high + 1)]
    lines = [("way", "rate", "samples", "min-max", "virtual s", "works", "range")]
    row = {
        "workers": num_workers,
        "own_rate": own_rate,
        "grid": [rate / own_rate for rate in grid],
        "ways": {},
    }
    began_s = time.process_time()
    for name, (strategy, factor) in ways(num_workers).items():
        found = sweep(job, strategy, num_workers, [rate * factor for rate in grid], options, folder)
        judged = judge(found, own_rate)
        lines.append(line_of(name, judged))
        print(
            f"{num_workers} workers, {name}: works at {len(judged['works'])} of {len(grid)} rates", flush=True
        )
        sweeps = [{"rate": rate / own_rate, "runs": runs} for rate, runs in found.items()]
        row["ways"][name] = {"strategy": strategy, **judged, "sweep": sweeps}
    budget = job.epochs * job.data.num_samples
    print(
        f"\n{num_workers} virtual workers, {options.seeds} seed(s), at most {budget} samples a run;\n"
        f"rates as multiples of the job's own ({own_rate:g}), samples and virtual s to the target"
    )
    print(table(lines))
    spent_s = time.process_time() - began_s
    settings = {"seeds": options.seeds, "epochs": options.epochs, "compute": COMPUTE, "cpu_s": spent_s}
    print(f"written to {write_row('rates', row | settings | {'target': dict(job.target)})}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--exponents", type=int, nargs=2, default=[-5, 6], help="of 2, first and last")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rates-") as folder:
        pack(load_source("digits"), Path(folder) / "digits", PackOptions(0.2), "digits")
        job = digits(folder, options.epochs)
        own_rate = build(job, None, torch.device("cpu"))[1].param_groups[0]["lr"]
        print(f"{machine()['cpu']}, one thread; compute {COMPUTE}", flush=True)
        for num_workers in options.workers:
            contest(job, own_rate, num_workers, options, folder)


if __name__ == "__main__":
    main()
