"""How long does a DDP step of many small tensors take where other processes want the cores, and how much of them?

    mpitrain launch -n 2 benchmarks/loaded.py [--busy 8] [--rounds 15] [--steps 20]

Rank 0 starts `--busy` processes that compute for ever. Each rank trains 20 linear layers (40 tensors of 5,440 numbers
in all) with torch's DDP, by turns over gloo and over our group, in blocks of `--steps` steps. A block takes as long as
the slowest rank; `cpu` is what all ranks' threads have computed in it, wherever they ran. What a rank does while it
waits decides: one that polls uses up its share of a core, and is not scheduled when its message comes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import start_gloo
from measuring.measurement import BASICS, Command, Measurement
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.mpi.runtime import start

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level

MEASUREMENT = Measurement(
    contestants=("gloo",),
    depends=(*BASICS, "mpitrain/devices", "mpitrain/mpi"),
    wanted="at most 1.05 of gloo's time (upper end), and at most 1.2 of what gloo computes",
    keys=("ranks", "busy"),
    figures=("step_ratio_to_gloo", "cpu_ratio_to_gloo"),
    commands=(Command("mpitrain launch -n 2 benchmarks/loaded.py --rounds 60", minutes=4),),
)

NUM_LAYERS, WIDTH, BATCH = 20, 16, 8
WAYS = ("mpitrain", "gloo")


class Contestant:
    """A model of its own over the given group."""

    def __init__(self, group):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.module = DistributedDataParallel(layers, process_group=group)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.x = torch.randn(BATCH, WIDTH)

    def step(self):
        self.optimizer.zero_grad()
        self.module(self.x).square().mean().backward()
        self.optimizer.step()


def measure(found, num_rounds, num_steps):
    """Way -> (seconds, seconds of computing) of one step, one pair a round."""
    figures = {way: [] for way in found}
    for number in range(num_rounds + 1):
        for way, contestant in found.items():
            runtime.barrier()
            began_s, computed_s = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                contestant.step()
            own = [time.perf_counter() - began_s, time.process_time() - computed_s]
            every = runtime.allgather(own)
            if number:  # the first round warms up
                wall_s, cpu_s = max(each[0] for each in every), sum(each[1] for each in every)
                figures[way].append((wall_s / num_steps, cpu_s / num_steps))
    return figures


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--busy", type=int, default=8, help="processes that compute beside the ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gloo = start_gloo(runtime)
    ours = dist.new_group(backend="mpi4py")
    found = {"mpitrain": Contestant(ours), "gloo": Contestant(gloo)}
    num_busy = options.busy if runtime.rank == 0 else 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        figures = measure(found, options.rounds, options.steps)
    finally:
        for process in busy:
            process.kill()
    if runtime.rank == 0:
        show(figures, options)
    dist.destroy_process_group()
    runtime.finish()


def show(figures, options):
    columns = {way: list(zip(*pairs, strict=True)) for way, pairs in figures.items()}
    row = {"ranks": runtime.size, "busy": options.busy, "rounds": options.rounds}
    lines = [("", *WAYS, "ours / gloo", "95 %")]
    for which, name in enumerate(("step", "cpu")):
        middle = {way: statistics.median(columns[way][which]) * 1e3 for way in WAYS}
        ratio = median_ratio(columns["mpitrain"][which], columns["gloo"][which])
        row[f"{name}_ms"], row[f"{name}_ratio_to_gloo"] = middle, ratio
        lines.append(
            (f"{name}, ms", *(f"{middle[way]:.2f}" for way in WAYS), f"{ratio[0]:.2f}",
             f"{ratio[1]:.2f} .. {ratio[2]:.2f}")
        )  # fmt: skip
    print(
        f"{machine()['num_cores']} cores, {runtime.size} ranks beside {options.busy} processes that compute"
    )
    print(table(lines), flush=True)
    write_row("loaded", row)


if __name__ == "__main__":
    main()
