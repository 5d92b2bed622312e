"""What a process has when it has done the same thing often. Arguments: the case, and a folder.

Memory, open files, threads and shared memory are looked at after a third of it, when all that is kept for good is
there, and at the end; every rank prints both as JSON.
"""

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

PUSHES, TRAININGS, GROUPS = 3000, 99, 30
BATCH_SIZE = 4
TURNS = (mt.AllReduce(), mt.Async(), mt.LocalSGD(period=2))

case, folder = sys.argv[1], Path(sys.argv[2])
runtime = start()
seen: list[dict[str, int]] = []
calls: list[int] = []


def look() -> None:
    """What this process has now, without what only waits to be collected."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
    }
    ours = Path(os.environ.get("OMPI_MCA_btl_sm_backing_directory", "/dev/shm"))
    seen.append(
        {
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
            "mapped": len(mapped),
            "shared": len(os.listdir(ours)),
        }
    )


class Looks:
    """On the server, in the middle of the run, in which all is there that belongs to it."""

    def on_step(self, row):
        if case == "pushes" and row["step"] in (PUSHES // 3, PUSHES - 100):
            look()


def loss(model, batch):
    """On a worker, of whose batches there is a half."""
    calls.append(1)
    if case == "pushes" and len(calls) in (PUSHES // 6, PUSHES // 3):
        look()
    return toy.square_loss(model, batch)


def slow_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-4)


def train(strategy, name, batches):
    job = toy.make_job(
        loss=loss,
        optimizer=slow_sgd,
        batch_size=BATCH_SIZE,
        epochs=1,
        checkpoint_every="never",
        data=toy.Memory(batches * BATCH_SIZE),
        callbacks=[Looks()],
        log_every=1,
    )
    result = mt.train(job, strategy, run_dir=str(folder / name), quiet=True)
    assert result["status"] == "ok", result


def often(times, once):
    for number in range(times):
        once(number)
        if number + 1 in (times // 3, times):
            look()


def group(number):
    dist.init_process_group("mpi4py")
    half = dist.new_group([0, 1])
    for one in (dist.group.WORLD, half):
        tensor = torch.full((10_000 + number,), 1.0)
        dist.all_reduce(tensor, group=one)
        assert float(tensor[0]) == 2.0
    dist.destroy_process_group()


if case == "pushes":
    train(mt.Async(), "run", PUSHES)
elif case == "trainings":
    often(TRAININGS, lambda number: train(TURNS[number % len(TURNS)], f"run-{number}", 8))
else:
    often(GROUPS, group)
print(json.dumps(seen))
