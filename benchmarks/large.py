"""What do models of hundreds of megabytes cost: a step of one large layer, and an averaging of it?

    mpitrain launch -n 2 benchmarks/large.py
    env GLIBC_TUNABLES=glibc.malloc.hugetlb=0 mpitrain launch -n 2 benchmarks/large.py      # in pages of 4 KiB

The model is one layer of 49 million parameters, 196 MB; a step is zero_grad, forward, backward, exchange and SGD with
momentum on a fixed batch of 16, one torch thread a rank. The ways take turns, on all ranks at once but for the first:

    one process     rank 0 alone, plain torch: no exchange
    gloo            torch's DDP over gloo
    allreduce       torch's DDP over our process group
    localsgd        one averaging of the parameters
    bare            one blocking Allreduce of as many bytes, in place, and no mean

`launch` has glibc ask for huge pages, unless the environment says what else it is to do. `faults` are the minor page
faults of rank 0 in one turn, each of which the kernel answers with a page that it clears.
"""

from __future__ import annotations

import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import TRAINING, Command, Measurement
from measuring.turns import take_turns
from torch import nn

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.synchronous.collectives import GroupCollectives
from mpitrain.training.synchronous.ddp import data_parallel

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo", "a bare MPI Allreduce of the same size"),
    bound="the step of one process in plain torch",
    wanted="a step at most 0.75 of gloo's with at most 5,000 page faults or as many as plain torch; an averaging at "
    "most 1.7 of a bare Allreduce",
    depends=TRAINING,
    keys=("pages", "ranks"),
    figures=("step_ratio.*", "averaging_ratio"),
    commands=(
        Command("mpitrain launch -n 2 benchmarks/large.py", minutes=1, covers={"pages": "huge"}),
        Command(
            "env GLIBC_TUNABLES=glibc.malloc.hugetlb=0 mpitrain launch -n 2 benchmarks/large.py",
            minutes=1,
            covers={"pages": "small"},
        ),
    ),
)

BATCH = 16
WARM_UP = 2
STEPS = ("one process", "gloo", "allreduce")


class Contestant:
    """A model of its own with its optimizer; `turn()` is one training step, of which `faults` are counted."""

    def __init__(self, width, wrap=None):
        torch.manual_seed(0)
        self.module = nn.Linear(width, width, bias=False)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9)
        self.called = wrap(self.module) if wrap else self.module
        self.x = torch.randn(BATCH, width)
        self.faults = []

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.called(self.x).square().mean().backward()
        self.optimizer.step()

    def turn(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.step()
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


class Averaging(Contestant):
    """The mean of what all hold, as `localsgd()` takes it."""

    def __init__(self, width, group):
        super().__init__(width)
        self.averager = Averager(
            self.module, self.optimizer, mt.LocalSGD(16), collectives=GroupCollectives(group)
        )

    def step(self):
        self.averager.average()


class Bare(Contestant):
    """One blocking Allreduce of the parameters, in place."""

    def __init__(self, width, comm):
        super().__init__(width)
        self.comm, self.flat = comm, self.module.weight.detach().view(-1).numpy()
        self.flat.fill(0.0)  # which sums leave as it is

    def step(self):
        self.comm.Allreduce(MPI.IN_PLACE, [self.flat, MPI.FLOAT])


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument(
        "--width", type=int, default=7000, help="of the layer, whose parameters are its square"
    )
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm, width = runtime.comm.Dup(), options.width
    gloo, ours = start_gloo(runtime), dist.new_group(backend="mpi4py")
    contestants = {
        "one process": Contestant(width) if runtime.rank == 0 else None,
        "gloo": Contestant(width, lambda module: data_parallel(module, gloo)),
        "allreduce": Contestant(width, lambda module: data_parallel(module, ours)),
        "localsgd": Averaging(width, ours),
        "bare": Bare(width, comm),
    }

    def together():
        request = comm.Ibarrier()  # who has no turn sleeps
        while not request.Test():
            time.sleep(0.0005)

    turns = {way: one.turn if one else None for way, one in contestants.items()}
    seconds = take_turns(turns, options.rounds, 1, ready=together, done=together, num_warm_up=WARM_UP)
    if runtime.rank == 0:
        faults = {way: statistics.median(one.faults[WARM_UP:]) for way, one in contestants.items()}
        show(options, seconds, faults)
    never_destroyed(*contestants.values())
    dist.destroy_process_group()
    runtime.finish()


def show(options, seconds, faults):
    pages = "small" if "hugetlb=0" in os.environ.get("GLIBC_TUNABLES", "hugetlb=0") else "huge"
    steps = {way: median_ratio(seconds[way], seconds["gloo"]) for way in STEPS}
    averaging = median_ratio(seconds["localsgd"], seconds["bare"])
    medians = {way: 1e3 * statistics.median(values) for way, values in seconds.items()}
    ratios = {
        way: f"{middle:.2f} ({low:.2f} - {high:.2f}) of gloo" for way, (middle, low, high) in steps.items()
    }
    ratios["localsgd"] = "{:.2f} ({:.2f} - {:.2f}) of bare".format(*averaging)
    lines = [("way", "median ms", "ratio (95 %)", "faults")]
    lines += [(way, f"{medians[way]:.1f}", ratios.get(way, ""), f"{faults[way]:.0f}") for way in seconds]
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank, {pages} pages")
    print(f"{options.width**2 / 1e6:.1f} million parameters, {runtime.size} ranks\n{table(lines)}")
    row = {"pages": pages, "width": options.width, "ranks": runtime.size, "rounds": options.rounds}
    row |= {"median_ms": medians, "faults": faults, "step_ratio": steps, "averaging_ratio": averaging}
    write_row("large", row)


if __name__ == "__main__":
    main()
