"""What does averaging every H steps save beside an allreduce at every step?

    mpitrain launch -n 4 benchmarks/averaging.py --where "one host"

Every rank trains the same model with fresh batches of a seeded task, one torch thread a rank, SGD without momentum.
Contestants take turns; each takes whole periods, so that its averaging is in its steps. `sent` is what a rank sends in
a step: 2 (N - 1)/N of the model, divided by H. Run it between emulated hosts for the rate of a link.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Command, Measurement
from measuring.models import MODELS
from measuring.turns import take_turns
from torch import nn

import mpitrain as mt
from mpitrain.mpi.process_group.process_group import init_default_group
from mpitrain.mpi.runtime import start
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.synchronous.ddp import data_parallel

runtime = start()

MEASUREMENT = Measurement(
    contestants=("an allreduce at every step",),
    depends=TRAINING,
    keys=("where", "model"),
    commands=(
        Command("mpitrain launch -n 2 benchmarks/averaging.py", minutes=2, covers={"model": "mlp"}),
        Command(
            "mpitrain launch -n 2 benchmarks/averaging.py --model cnn --rounds 4",
            minutes=2,
            covers={"model": "cnn"},
        ),
    ),
)

BATCH, NUM_BATCHES = 32, 16
WAYS = {
    "allreduce()": None,
    "localsgd(4)": mt.LocalSGD(4),
    "localsgd(16)": mt.LocalSGD(16),
    "localsgd(16, wire='int8')": mt.LocalSGD(16, wire="int8"),
    "localsgd(16, outer=diloco())": mt.LocalSGD(16, outer=mt.DiLoCo()),
}


class Contestant:
    """A model of its own on one way; `turn()` is so many steps that every averaging it owes is in them."""

    def __init__(self, strategy, make, shape):
        torch.manual_seed(0)
        self.module, self.strategy, self.num = make(), strategy, 0
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.averager = None if strategy is None else Averager(self.module, self.optimizer, strategy)
        self.called = data_parallel(self.module) if strategy is None else self.module
        self.num_steps = 4 if strategy is None else strategy.period
        generator = torch.Generator().manual_seed(1 + runtime.rank)
        self.x = torch.randn(NUM_BATCHES, BATCH, *shape, generator=generator)
        self.y = torch.randint(10, (NUM_BATCHES, BATCH), generator=generator)

    def turn(self):
        for _ in range(self.num_steps):
            which, self.num = self.num % NUM_BATCHES, self.num + 1
            if self.averager is not None:
                self.averager.begin_step()
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.called(self.x[which]), self.y[which]).backward()
            self.optimizer.step()
            if self.averager is not None and self.averager.end_step():
                self.averager.average()


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--where", default="one host", help="what to call the network in the results")
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_default_group(runtime)
    make, shape = MODELS[options.model]
    contestants = {way: Contestant(strategy, make, shape) for way, strategy in WAYS.items()}
    seconds = take_turns(
        {way: contestant.turn for way, contestant in contestants.items()}, options.rounds, 1,
        ready=dist.barrier, counted=dist.barrier,
    )  # fmt: skip
    seconds = {way: [s / contestants[way].num_steps for s in values] for way, values in seconds.items()}
    if runtime.rank == 0:
        show(options, contestants, seconds)
    dist.destroy_process_group()
    runtime.finish()


def show(options, contestants, seconds):
    numel = sum(p.numel() for p in contestants["allreduce()"].module.parameters())
    rows, record = [("way", "ms a step", "x allreduce", "95 %", "sent a step")], {}
    for way, contestant in contestants.items():
        middle, low, high = median_ratio(seconds["allreduce()"], seconds[way])
        sent = 2 * (runtime.size - 1) / runtime.size * 4 * numel
        if contestant.averager is not None:
            sent = contestant.averager.means.sent_bytes / contestant.num
        step_s = statistics.median(seconds[way])
        record[way] = {"step_s": step_s, "speedup": [middle, low, high], "sent_bytes": sent}
        ratio = (f"{middle:.2f}", f"{low:.2f} - {high:.2f}")
        rows.append((way, f"{1e3 * step_s:.1f}", *ratio, f"{sent / 1e6:.2f} MB"))
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    print(
        f"{options.model}, {numel / 1e6:.2f} million parameters, {runtime.size} ranks, {options.where}\n{table(rows)}"
    )
    row = {"model": options.model, "where": options.where, "ranks": runtime.size, "rounds": options.rounds}
    write_row("averaging", row | {"ways": record})


if __name__ == "__main__":
    main()
