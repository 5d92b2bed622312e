"""What does each codec save on a slow link, what does it cost, and below which link rate does it pay?

    mpitrain launch -n 4 benchmarks/compression.py --where "one host"
    .venv/bin/python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python \
        benchmarks/compression.py --where "4 hosts, 100 Mbit/s" --ways gloo threshold

Every rank trains the MLP of 6.3 million parameters (`--model cnn`: 0.4 million) with fresh batches of a seeded task,
one torch thread a rank, SGD without momentum. Contestants take turns in blocks of a few steps:

    gloo, gloo fp16, gloo powersgd   torch's DDP over gloo: no hook, its fp16 hook, its PowerSGD hook of rank 2
    allreduce                        DDP over our group, no codec
    float16 ... qsgd                 DDP over our group with that codec

`message` is what one rank makes of its gradients, `received` what it takes off its link in a step: 2 (N - 1)/N
times the message where ranks average, N - 1 messages where they are handed to all. A codec pays below the
break-even rate (bytes saved on the link) / (its own time). Sparse codecs first take `--settle` steps, in which
the threshold finds its density.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import start_gloo
from measuring.measurement import TRAINING, Command, Measurement
from measuring.models import MODELS
from measuring.turns import take_turns
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.torch_versions import without_sync_of_buffers
from mpitrain.training.synchronous.codec_hooks import attach_codec
from mpitrain.training.synchronous.ddp import data_parallel

runtime = start()

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo: plain, its fp16 hook, its PowerSGD hook",),
    depends=TRAINING,
    keys=("where", "model"),
    figures=("ways.*.speedup",),
    commands=(
        Command(
            'mpitrain launch -n 4 benchmarks/compression.py --where "one host"',
            minutes=3,
            covers={"where": "one host"},
        ),
        Command(
            "python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python "
            'benchmarks/compression.py --where "4 hosts, 100 Mbit/s" --rounds 4',
            minutes=5,
            covers={"where": "4 hosts, 100 Mbit/s"},
        ),
        Command(
            "python benchmarks/measuring/hosts.py run --hosts 4 --rate 1gbit .venv/bin/python "
            'benchmarks/compression.py --where "4 hosts, 1 Gbit/s" --rounds 8',
            minutes=3,
            covers={"where": "4 hosts, 1 Gbit/s"},
        ),
    ),
)

BATCH, NUM_BATCHES = 32, 64
CODECS = {
    "float16": mt.Float16(), "bfloat16": mt.BFloat16(), "eightbit": mt.EightBit(), "qsgd": mt.QSGD(),
    "onebit": mt.OneBit(), "powersgd": mt.PowerSGD(), "topk": mt.TopK(), "threshold": mt.Threshold(),
}  # fmt: skip
FLAGS_OF_OURS = {"init_sync": False, "gradient_as_bucket_view": True, **without_sync_of_buffers()}
PEERS = ("gloo", "gloo fp16", "gloo powersgd")
WAYS = (*PEERS, "allreduce", *CODECS)
ADAPTS = ("topk", "threshold")


class Contestant:
    """A model of its own on one way; `step()` is one training step with the next batch."""

    def __init__(self, way, make, shape, groups):
        torch.manual_seed(0)
        self.way, self.module, self.hook, self.turn = way, make(), None, 0
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        if way in PEERS:
            # torch's PowerSGD starts collectives in callbacks; over gloo those of two buckets cross and the job
            # aborts, so it gets one bucket.
            bucket = {"bucket_cap_mb": 1000} if way == "gloo powersgd" else {}
            self.parallel = DistributedDataParallel(
                self.module, process_group=groups["gloo"], **FLAGS_OF_OURS, **bucket
            )
            if way == "gloo fp16":
                self.parallel.register_comm_hook(groups["gloo"], default_hooks.fp16_compress_hook)
            elif way == "gloo powersgd":
                state = powerSGD_hook.PowerSGDState(groups["gloo"], 2, start_powerSGD_iter=2)
                self.parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            self.parallel = data_parallel(self.module, groups["mpi4py"])
            if way in CODECS:
                self.hook = attach_codec(self.parallel, CODECS[way], groups["mpi4py"])
        generator = torch.Generator().manual_seed(1 + runtime.rank)
        teacher = torch.randn(torch.Size(shape).numel(), 10, generator=torch.Generator().manual_seed(0))
        self.x = torch.randn(NUM_BATCHES, BATCH, *shape, generator=generator)
        self.y = (self.x.flatten(2) @ teacher).argmax(2)

    def step(self):
        x, y = self.x[self.turn % NUM_BATCHES], self.y[self.turn % NUM_BATCHES]
        self.turn += 1
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.parallel(x), y).backward()
        self.optimizer.step()

    def forget(self):
        """Measure the codec from here on."""
        if self.hook is not None:
            self.hook.num_steps, self.hook.sent_bytes, self.hook.codec_s = 0, 0, 0.0


def measure(options, groups):
    make, shape = MODELS[options.model]
    contestants = {way: Contestant(way, make, shape, groups) for way in options.ways}
    for way, contestant in contestants.items():
        for _ in range(options.settle if way in ADAPTS else 3):
            contestant.step()
        contestant.forget()
    barrier = partial(dist.barrier, group=groups["mpi4py"])
    steps = {way: contestant.step for way, contestant in contestants.items()}
    seconds = take_turns(steps, options.rounds, options.block, ready=barrier, counted=barrier, num_warm_up=0)
    return seconds, {way: one.hook.statistics() if one.hook else {} for way, one in contestants.items()}


def received(way, message, num_ranks):
    """Bytes off a rank's link in a step, by the cheapest algorithm that is used."""
    averaged = way not in CODECS or CODECS[way].averages
    return message * (2 * (num_ranks - 1) / num_ranks if averaged else num_ranks - 1)


def show(options, seconds, told):
    numel = sum(p.numel() for p in MODELS[options.model][0]().parameters())
    num = runtime.size
    base = options.ways[0]
    full = received("allreduce", 4 * numel, num)
    rows = [("way", "steps/s", f"x {base}", "95 %", "message", "received", "codec ms", "pays below")]
    record = {}
    for way, values in seconds.items():
        middle, low, high = median_ratio(seconds[base], values)
        told_bytes = told[way].get("mean_bytes", {"gloo fp16": 2 * numel}.get(way, 4 * numel))
        unknown = way == "gloo powersgd"  # torch does not count; its arithmetic is that of `powersgd`
        takes = received(way, told_bytes, num)
        codec_s = told[way].get("codec_ms", 0.0) / 1e3
        edge = 8 * (full - takes) / codec_s if codec_s else None
        record[way] = {
            "step_s": statistics.median(values), "speedup": [middle, low, high],
            "message_bytes": None if unknown else told_bytes, "received_bytes": None if unknown else takes,
            "break_even_bits_per_s": edge, **told[way],
        }  # fmt: skip
        rows.append(
            (way, f"{1 / statistics.median(values):.2f}", f"{middle:.2f}", f"{low:.2f} - {high:.2f}",
             "-" if unknown else f"{told_bytes / 1e3:.1f} kB", "-" if unknown else f"{takes / 1e3:.1f} kB",
             f"{1e3 * codec_s:.1f}" if codec_s else "-", f"{edge / 1e6:.0f} Mbit/s" if edge else "-")
        )  # fmt: skip
    print(f"\n{options.model}, {numel / 1e6:.2f} million parameters, {num} ranks, {options.where}")
    print(table(rows), flush=True)
    row = {
        "model": options.model,
        "where": options.where,
        "ranks": num,
        "rounds": options.rounds,
        "ways": record,
    }
    write_row("compression", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--where", default="one host", help="what to call the network in the results")
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=2)
    parser.add_argument("--settle", type=int, default=150)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = {"gloo": start_gloo(runtime), "mpi4py": dist.new_group(backend="mpi4py")}
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    seconds, told = measure(options, groups)
    if runtime.rank == 0:
        show(options, seconds, told)
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
