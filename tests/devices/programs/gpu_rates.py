"""How many samples a second torch's DDP takes on the accelerator, over each way that there is, in turns.

    gpu_rates.py ROUNDS MODEL ...

The ways: "host", our group by way of pinned host memory; "direct", our group where the MPI says that it reads the
device's memory; "gloo"; and torch's own back end for the device, which wants a device a rank (NCCL refuses two ranks on
one, and MPS changes nothing of that), so on one GPU it takes part where there is one rank. Rank 0 prints a line of JSON
for each model.
"""

import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.devices import accelerator
from mpitrain.mpi.memory.device_aware import gpu_aware
from mpitrain.mpi.runtime import start
from mpitrain.training.synchronous.ddp import data_parallel
from tests.devices import tested

BLOCK = 5
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
never_destroyed = importlib.import_module("measuring.gloo").never_destroyed
common, shapes = importlib.import_module("common"), importlib.import_module("models")
runtime = start()
KIND = tested.kind()
DEVICE = accelerator.of_rank(KIND, runtime.local_rank)
accelerator.make_current(DEVICE)


def small():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10))


ALL_MODELS = {**shapes.MODELS, "small": (small, (16,))}


class Steps:
    """A DDP model of its own over one way, with its optimizer, on one batch."""

    def __init__(self, name, wrap, buffers):
        make, shape = ALL_MODELS[name]
        torch.manual_seed(0)
        self.buffers = buffers
        self.turn()
        self.module = wrap(make().to(DEVICE))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.randn(shapes.BATCH, *shape).to(DEVICE)
        self.y = torch.randint(0, 10, (shapes.BATCH,)).to(DEVICE)

    def turn(self):
        """From here on device tensors travel so."""
        os.environ["MPITRAIN_GPU_BUFFERS"] = self.buffers
        gpu_aware.cache_clear()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.module(self.x), self.y).backward()
        self.optimizer.step()


def own_backend():
    """torch's own for such devices, where it is built and each rank has a device; or why not."""
    name = dist.Backend.default_device_backend_map.get(KIND, "gloo")
    if name in ("gloo", "mpi4py") or not dist.is_backend_available(name):
        return None, f"torch has no back end of its own for {KIND} here"
    if runtime.size > accelerator.num_devices():
        return None, f"{name} wants a device a rank"
    return name, ""


def ways():
    """Name -> (what makes a DDP model, how our group's buffers go), and why others are left out."""
    group, left_out = dist.group.WORLD, {}
    able, why = gpu_aware()
    found = {"host": (lambda module: data_parallel(module, group), "off")}
    if able:
        found["direct"] = (lambda module: data_parallel(module, group), "on")
    else:
        left_out["direct"] = why
    if KIND in dist.Backend.backend_capability["gloo"]:
        gloo = dist.new_group(backend="gloo")
        never_destroyed(gloo)
        found["gloo"] = (lambda module: DistributedDataParallel(module, process_group=gloo), "auto")
    else:
        left_out["gloo"] = f"it carries nothing of {KIND}"
    name, why = own_backend()
    if name is None:
        left_out["torch's own"] = why
    else:
        own = dist.new_group(backend=name)
        found[name] = (lambda module: DistributedDataParallel(module, process_group=own), "auto")
    return found, left_out


def seconds_of(contestants, rounds):
    """Of a step, of each in every round."""
    seconds = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, one in contestants.items():
            one.turn()
            accelerator.wait_for_all(DEVICE)
            runtime.barrier()
            began_s = time.perf_counter()
            for _ in range(BLOCK):
                one.step()
            accelerator.wait_for_all(DEVICE)
            seconds[name].append((time.perf_counter() - began_s) / BLOCK)
            runtime.barrier()
    return {name: values[1:] for name, values in seconds.items()}


def main(rounds, models):
    dist.init_process_group("mpi4py")
    found, left_out = ways()
    for model in models:
        contestants = {name: Steps(model, wrap, buffers) for name, (wrap, buffers) in found.items()}
        seconds = seconds_of(contestants, rounds)
        rates = {
            name: runtime.size * shapes.BATCH / statistics.median(values) for name, values in seconds.items()
        }
        times = {name: common.median_ratio(values, seconds["host"]) for name, values in seconds.items()}
        if runtime.rank == 0:
            row = {"model": model, "ranks": runtime.size, "samples_per_second": rates}
            row |= {"time_to_host": times, "left_out": left_out}
            print(json.dumps(row), flush=True)
    os.environ["MPITRAIN_GPU_BUFFERS"] = "auto"


main(int(sys.argv[1]), sys.argv[2:])
runtime.finish()
