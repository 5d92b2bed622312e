"""A rank of `other_mpi.py`: trains and exchanges, and rank 0 prints what that took as a line of JSON."""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.torch_versions import all_gather_single

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 50  # calls between two looks at the clock


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def pushing_job():
    """Gradients of 64 KB, which take no time to compute."""
    return mt.Job(
        model=partial(nn.Linear, 1023, 16),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=mt.Shards("none"),
        epochs=1,
        batch_size=1,
        synthetic=mt.Synthetic(1 << 20, x=((1023,), "float32"), y=((), "int64", 16)),
    )


def rate(job, strategy, seconds):
    """Samples a second of a run that takes about so long: a short one says how many steps that are."""
    steps, found, taken_s = 20, 0.0, 1.0
    for share in (0.0, 0.2, 1.0):
        if share:
            steps = max(20, int(steps * share * seconds / max(taken_s, 0.01)))
        result = mt.train(job, strategy, steps=steps, synthetic=True, checkpoint_every="never", quiet=True)
        found, taken_s = result["samples_per_second"], result["train_s"]
        taken_s = start().broadcast(taken_s)
    return found


def per_call_us(call, runtime, seconds):
    """Microseconds of one call, the median of blocks, the slowest rank's."""
    blocks, ends_s = [], time.perf_counter() + seconds
    while runtime.broadcast(time.perf_counter() < ends_s):
        runtime.barrier()
        began_s = time.perf_counter()
        for _ in range(BLOCK):
            call()
        blocks.append(max(runtime.allgather((time.perf_counter() - began_s) / BLOCK)))
    return statistics.median(blocks) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime = start()
    digits = runpy.run_path(str(ROOT / "jobs" / "digits.py"))["job"]
    found = {
        "mpi": runtime.library.partition(",")[0],
        "allreduce()": rate(digits, mt.AllReduce(), options.seconds),
    }
    if runtime.size >= 4:
        found["64 KB pushes"] = rate(pushing_job(), mt.Async(servers=1), options.seconds)
    dist.init_process_group("mpi4py")
    mine, whole = torch.ones(16), torch.ones(16 * runtime.size)
    exchange = partial(all_gather_single(), whole, mine)
    found["allgather"] = per_call_us(exchange, runtime, options.seconds / 3)
    found["barrier"] = per_call_us(dist.barrier, runtime, options.seconds / 3)
    if runtime.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
