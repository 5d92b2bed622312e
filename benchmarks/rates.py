"""How well do the remedies for stale gradients end, and how soon are they there, each at the rate that suits it best?

    python benchmarks/rates.py [--workers 16] [--seeds 5] [--epochs 20] [--rounds 16] [--speeds equal unequal]

Virtual time, one process, no MPI: virtual workers with seeded times of computing, an ideal network, a network of one
hidden layer on handwritten digits, SGD with momentum 0.9 at a constant rate. A worker's batch is 128 samples over the
number of workers (mu times lambda constant, as in Zhang et al., IJCAI 2016), one server. Five ways:

    sync                the mean of all N gradients of one version
    async               every gradient on arrival, in full
    async inverse       every gradient on arrival, worth 1/tau
    softsync            the mean of S = workers / 4 gradients, in full
    softsync inverse    the mean of S gradients, each worth 1/tau: the combination of Zhang et al.

Speeds are equal (every gradient's time is drawn from one law), or unequal: a quarter of the workers, never the one
that validates, takes five times as long.

Which rates are tried follows from what is found, so no grid favours anybody. From a common rate a way goes up and
down by factors of 2, two seeds each, until the best rate lies between two worse ones on either side; then the best
and its neighbours get all seeds. That is done for two aims, and each is judged at its own best rate by the median
over the seeds, with their range:

    final loss    the validation loss of the model after the last update
    samples       where the first of four marks in a row with at least 95 % of the validation samples right lies; marks
                  are a quarter of an epoch apart, on the parameters that the first worker then holds

A rate at which every seed gets there "works"; how many do is not told, for that is a property of the grid. A run that
is not finite has no final loss. Virtual results do not depend on the machine's load.
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
import time
from pathlib import Path

import torch
from measuring.common import machine, make_parser, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement
from torch import nn

import mpitrain as mt
from mpitrain.data.sources import load_source
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.simulation.call import simulate
from mpitrain.values import parse

MEASUREMENT = Measurement(
    contestants=("`sync()`",),
    depends=VIRTUAL,
    keys=("workers", "speeds"),
    figures=("ways.*.loss.median",),
    commands=(Command("python benchmarks/rates.py --seeds 3", minutes=18),),
)

PARTS, SPLIT, BATCH, MARKS, GOAL = 4, 4, 128, 4, 0.95
COMPUTE, SLOWER = "shifted_exponential(0.5, 0.5)", 5
FIRST_SEEDS, WORSE = 2, 2  # seeds of a rate that is only tried, and worse rates that end the search
MIDDLE = 0.05  # the rate where every search begins


def ways(num_workers):
    """Strategy of each contestant."""
    updates = max(1, num_workers // SPLIT)
    return {
        "sync": "sync()",
        "async": "async()",
        "async inverse": "async(damping=inverse())",
        "softsync": f"softsync(updates={updates})",
        "softsync inverse": f"softsync(updates={updates},damping=inverse())",
    }


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

    def sequential(self, batch_size, first=0, end=None):
        yield {name: tensor[first:end] for name, tensor in everything(self.source).items()}


@functools.cache
def everything(source):
    with source.reader(source.scan(), 0) as reader:
        return next(iter(reader.sequential(source.scan().num_samples)))


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def accuracy(model, batch):
    return {"accuracy": (model(batch["x"]).argmax(dim=1) == batch["y"]).float().mean()}


def digits(folder, num_epochs, batch_size):
    """The job, validated every quarter of an epoch."""
    train, validate = (mt.Shards(f"{folder}/digits/{name}-*.h5") for name in ("train", "validate"))
    part = train.scan().num_samples // PARTS // batch_size * batch_size
    return mt.Job(
        model=perceptron, loss=cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=MIDDLE, momentum=0.9),
        data=Parts(train, part), validate=Whole(validate), metrics=accuracy, epochs=num_epochs * PARTS,
        batch_size=batch_size,
    )  # fmt: skip


def there(marks):
    """Samples at the first of `MARKS` marks in a row that reach the goal; infinite if there are none."""
    good = [row["accuracy"] >= GOAL for row in marks]
    hits = (at for at in range(len(marks) - MARKS + 1) if all(good[at : at + MARKS]))
    return next((marks[at]["samples"] for at in hits), math.inf)


def run(job, strategy, num_workers, rate, seed, slow, folder):
    """One run: its final loss, and how many samples it took to be there."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    with contextlib.redirect_stdout(io.StringIO()):
        result = simulate(
            dataclasses.replace(job, seed=seed), parse(strategy, "strategy"), num_workers, parse(COMPUTE, "compute"),
            lr=rate, run_dir=str(folder), quiet=True, inject=slow,
        )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marks = [row for row in rows if "accuracy" in row]
    finite = result["status"] == "ok" and math.isfinite(result["validation_loss"])
    return {
        "seed": seed,
        "loss": result["validation_loss"] if finite else math.inf,
        "accuracy": result["accuracy"] if finite else 0.0,
        "samples": there(marks) if finite else math.inf,
        "staleness": result["staleness_mean"],
        "virtual_s": result["virtual_s"],
    }


class Search:
    """One way's runs by exponent: the rate is `MIDDLE` times 2 to the exponent."""

    def __init__(self, one_run, num_seeds, most_rates):
        self.one_run, self.num_seeds, self.most_rates = one_run, num_seeds, most_rates
        self.runs = {}

    def ensure(self, exponent, num_seeds):
        """At least so many seeds at this rate."""
        found = self.runs.setdefault(exponent, [])
        while len(found) < min(num_seeds, self.num_seeds):
            found.append(self.one_run(MIDDLE * 2.0**exponent, len(found)))

    def middle(self, exponent, aim):
        """The median over the seeds there are."""
        return statistics.median(run[aim] for run in self.runs[exponent])

    def best(self, aim, least_seeds=1):
        """The best exponent for an aim among those with so many seeds; None where no run got there."""
        tried = [exponent for exponent, runs in self.runs.items() if len(runs) >= least_seeds]
        best = min(tried, key=lambda exponent: (self.middle(exponent, aim), exponent))
        return best if math.isfinite(self.middle(best, aim)) else None

    def bracket(self, aim):
        """Go up and down until the best rate has worse ones on either side."""
        while len(self.runs) < self.most_rates:
            best = self.best(aim)
            low, high = min(self.runs), max(self.runs)
            if best is None:  # a loss tells where to look; without one, lower rates may be finite
                wanted = low - 1 if aim == "loss" else None
            elif best - low < WORSE:
                wanted = low - 1
            else:
                wanted = high + 1 if high - best < WORSE else None
            if wanted is None:
                return
            self.ensure(wanted, FIRST_SEEDS)

    def settle(self, aim):
        """All seeds for the best rate and its neighbours, until the best of those is not an outer one."""
        while (best := self.best(aim)) is not None:
            near = [one for one in (best - 1, best, best + 1) if one in self.runs]
            if all(len(self.runs[one]) >= self.num_seeds for one in near):
                return
            for one in near:
                self.ensure(one, self.num_seeds)

    def search(self):
        self.ensure(0, FIRST_SEEDS)
        for aim in ("loss", "samples"):
            self.bracket(aim)
        for aim in ("loss", "samples"):
            self.settle(aim)

    def judged(self, aim):
        """The best rate for an aim, with the median and range over all seeds there; empty where none got there."""
        best = self.best(aim, self.num_seeds)
        if best is None:
            return {}
        values = sorted(run[aim] for run in self.runs[best])
        there = [value for value in values if math.isfinite(value)]
        return {
            "rate": MIDDLE * 2.0**best, "median": statistics.median(values), "range": [there[0], there[-1]],
            "missed": len(values) - len(there),
        }  # fmt: skip


def cells(judged, digits):
    """Rate, median and range, as text."""
    if not judged:
        return ("-", "missed", "-")
    low, high = judged["range"]
    missed = f" ({judged['missed']} missed)" if judged["missed"] else ""
    span = f"{low:.{digits}f}-{high:.{digits}f}{missed}"
    return (f"{judged['rate']:.3g}", f"{judged['median']:.{digits}f}", span)


def contest(job, num_workers, speeds, options, folder):
    """Every way with these speeds; prints the table and writes the row."""
    slow = num_workers // 4 if speeds == "unequal" else 0
    injected = [f"slow(worker={index},factor={SLOWER})" for index in range(num_workers - slow, num_workers)]
    lines = [("way", "rate", "final loss", "min-max", "rate", "samples", "min-max")]
    found, began_s = {}, time.process_time()
    for name, strategy in ways(num_workers).items():
        one_run = functools.partial(_run_at, job, strategy, num_workers, injected, folder)
        search = Search(one_run, options.seeds, options.rounds)
        search.search()
        judged = {aim: search.judged(aim) for aim in ("loss", "samples")}
        lines.append((name, *cells(judged["loss"], 4), *cells(judged["samples"], 0)))
        sweep = [
            {"rate": MIDDLE * 2.0**exponent, "runs": [_plain(run) for run in runs]}
            for exponent, runs in sorted(search.runs.items())
        ]
        edges = (min(search.runs), max(search.runs))
        inside = {aim: best is not None and edges[0] < best < edges[1] for aim, best in _bests(search)}
        found[name] = {"strategy": strategy, **judged, "inside": inside, "sweep": sweep}
        print(
            f"{speeds} speeds, {name}: {len(sweep)} rates, {time.process_time() - began_s:.0f} s", flush=True
        )
    budget = job.epochs * job.data.num_samples
    print(
        f"\n{num_workers} virtual workers, {speeds} speeds, {options.seeds} seed(s), {budget} samples a run,\n"
        f"{job.batch_size} a batch; medians, smallest and largest"
    )
    print(table(lines))
    row = {
        "workers": num_workers, "speeds": speeds, "seeds": options.seeds, "epochs": options.epochs,
        "batch": job.batch_size, "compute": COMPUTE, "inject": injected, "budget": budget,
        "goal": {"accuracy": GOAL, "marks": MARKS},
        "ways": found, "cpu_s": time.process_time() - began_s,
    }  # fmt: skip
    write_row("rates", row)


def _bests(search):
    return [(aim, search.best(aim, search.num_seeds)) for aim in ("loss", "samples")]


def _plain(run):
    """JSON knows no infinity."""
    return {key: None if value == math.inf else value for key, value in run.items()}


def _run_at(job, strategy, num_workers, injected, folder, rate, seed):
    return run(job, strategy, num_workers, rate, seed, injected, folder)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=16, help="rates that a way may try")
    parser.add_argument("--speeds", nargs="+", default=["equal", "unequal"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rates-") as folder:
        pack(load_source("digits"), Path(folder) / "digits", PackOptions(0.2), source="digits")
        job = digits(folder, options.epochs, max(1, BATCH // options.workers))
        print(f"{machine()['cpu']}, one thread; compute {COMPUTE}", flush=True)
        for speeds in options.speeds:
            contest(job, options.workers, speeds, options, folder)


if __name__ == "__main__":
    main()
