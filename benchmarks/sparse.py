"""What does a training step of a large embedding cost on two workers, in time and bytes, with sparse gradients?

    mpitrain launch -n 2 benchmarks/sparse.py [--rounds 9] [--rows 10000 4000000] [--batch 64 512]

One table of 16 columns, 8 words a sample drawn by Zipf's law (exponent 1), a small dense tower, SGD, one torch thread a
rank. The ways take turns in blocks of a few steps:

    alone           both at once with sparse gradients, no exchange (the bound)
    gloo dense      torch's DDP over gloo, whole gradients: the peer
    gloo sparse     the same with sparse=True
    dense           torch's DDP over our process group, whole gradients
    sparse          the same with sparse=True, as `allreduce()` trains it

Bytes are those that one rank's gradients of the table take, of one step: the whole table, or the rows that its batches
have touched with an index each, counted where they are sent. What torch's gloo sends of sparse gradients is not
counted: it gathers indices of 8 bytes, and values padded to the largest rank's.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import STEPS, Command, Measurement
from measuring.ranking import WIDTH, WORDS, Batches, Ranking
from measuring.turns import take_turns
from torch import nn

from mpitrain.mpi.process_group import sparse_allreduce
from mpitrain.mpi.runtime import start
from mpitrain.training.synchronous.ddp import data_parallel

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo, dense and sparse",),
    bound="both at once without an exchange",
    depends=STEPS,
    keys=("rows", "batch"),
    figures=("gloo_dense_over.*",),
    commands=(Command("mpitrain launch -n 2 benchmarks/sparse.py", minutes=3),),
)

runtime = start()
HIDDEN = 64


class Counter:
    """Bytes of indices and values that this rank has handed over for sparse gradients."""

    def __init__(self):
        self.num_bytes, self._carry = 0, sparse_allreduce._carry_one
        sparse_allreduce._carry_one = self

    def __call__(self, group, may_block, tensor, reduction, own, board):
        self.num_bytes += own.numbers.nbytes + own.values.nbytes
        return self._carry(group, may_block, tensor, reduction, own, board)


class Way(Batches):
    """`step` is one training step of a model of its own."""

    def __init__(self, rows, batch, sparse, wrap=lambda module: module):
        super().__init__(rows, batch, runtime.rank)
        model = Ranking(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse), HIDDEN)
        self.model, self.optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, words, clicked):
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(self.model(words), clicked).backward()
        self.optimizer.step()


def measure(rows, batch, options, groups, counter):
    ours, gloo = groups
    ways = {
        "alone": Way(rows, batch, True),
        "gloo dense": Way(rows, batch, False, lambda module: data_parallel(module, gloo)),
        "gloo sparse": Way(rows, batch, True, lambda module: data_parallel(module, gloo)),
        "dense": Way(rows, batch, False, lambda module: data_parallel(module, ours)),
        "sparse": Way(rows, batch, True, lambda module: data_parallel(module, ours)),
    }
    never_destroyed(ways["gloo dense"].model, ways["gloo sparse"].model)
    counter.num_bytes = 0
    steps = {name: partial(way.run, 1) for name, way in ways.items()}
    seconds = take_turns(steps, options.rounds, options.block, ready=runtime.barrier)
    return seconds, counter.num_bytes / (options.block * (options.rounds + 1))


def show(rows, batch, seconds, sent, options):
    whole = rows * WIDTH * 4
    lines = [("way", "median ms", "gloo dense over it (95 %)", "bytes of the table")]
    ratios = {}
    for name, values in seconds.items():
        ratios[name] = middle, low, high = median_ratio(seconds["gloo dense"], values)
        counted = {"sparse": f"{sent:,.0f}", "alone": "0", "gloo sparse": "-"}.get(name, f"{whole:,}")
        lines.append(
            (
                name,
                f"{statistics.median(values) * 1e3:.2f}",
                f"{middle:.2f} ({low:.2f} - {high:.2f})",
                counted,
            )
        )
    print(
        f"\n{rows:,} rows of {WIDTH}, batch {batch} x {WORDS} words, {options.rounds} rounds of {options.block} steps"
    )
    print(table(lines))
    print(f"sparse gradients take {whole / sent:.1f} times fewer bytes", flush=True)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    row = {
        "rows": rows, "batch": batch, "words": WORDS, "width": WIDTH, "rounds": options.rounds, "block": options.block,
        "median_ms": medians, "gloo_dense_over": ratios, "sparse_bytes": sent, "dense_bytes": whole,
    }  # fmt: skip
    write_row("sparse", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    options = parser.parse_args()
    assert runtime.size == 2, "start with 2 ranks"
    torch.set_num_threads(1)
    start_gloo(runtime)
    groups = dist.new_group([0, 1], backend="mpi4py"), dist.new_group([0, 1], backend="gloo")
    counter = Counter()
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    for rows in options.rows:
        for batch in options.batch:
            seconds, sent = measure(rows, batch, options, groups, counter)
            if runtime.rank == 0:
                show(rows, batch, seconds, sent, options)
    never_destroyed(groups[1])
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
