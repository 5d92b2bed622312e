"""What do exchanges of device tensors cost on one GPU, and what does the package add to a step there?

    mpitrain launch -n 2 benchmarks/gpu.py [--rounds 20] [--megabytes 1 25 100]
    mpitrain launch -n 1 benchmarks/gpu.py

On two ranks, which share the GPU (NCCL refuses that), contestants take turns in blocks:

    all_reduce      the same device tensor over gloo (the peer) and over our group, which has MPI add what lies on the
                    device, or goes by way of pinned host memory, as it does by default under Open MPI
                    (MPITRAIN_GPU_BUFFERS=on: MPI adds it); "host": over our group from host to host; "copies": down to
                    the host and up again
    step            zero_grad, forward, backward, exchange, SGD with momentum: alone, both at once without exchange,
                    over gloo's DDP, over ours

On one rank: a loop of plain torch, with its samples in memory, beside a whole run of `mt.train(job, AllReduce())` that
reads them from HDF5 shards; both copy batches to the GPU. Every block ends when the device has done its work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring.common import make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed
from measuring.measurement import TRAINING, Measurement
from measuring.models import BATCH, MODELS
from torch import nn

import mpitrain as mt
from mpitrain.data.write.shard_file import write_shard
from mpitrain.mpi.memory.buffers import adds_on_device
from mpitrain.mpi.runtime import start
from mpitrain.training.synchronous.ddp import data_parallel

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo", "a loop of plain torch"),
    bound="the step alone",
    depends=TRAINING,
    keys=("what", "direct", "ranks", "model", "megabytes"),
    figures=("ratio_to_gloo.*", "ratio_to_torch.mpitrain"),
    campaign=(
        "mpitrain launch -n 2 benchmarks/gpu.py",
        "MPITRAIN_GPU_BUFFERS=on mpitrain launch -n 2 benchmarks/gpu.py",
        "mpitrain launch -n 1 benchmarks/gpu.py",
    ),
)

runtime = start()
DEVICE = torch.device("cuda", 0)
BLOCK = 5
NUM_SAMPLES = 64 * BATCH


def wide() -> nn.Module:
    """50 million parameters in three layers."""
    return nn.Sequential(
        nn.Linear(1024, 6144), nn.ReLU(), nn.Linear(6144, 6144), nn.ReLU(), nn.Linear(6144, 10)
    )


ALL_MODELS = {**MODELS, "wide": (wide, (1024,))}


class Stepping:
    """A model of its own on the device with its optimizer, on one batch."""

    def __init__(self, name: str, wrap: Callable[[nn.Module], nn.Module] = lambda module: module):
        make, shape = ALL_MODELS[name]
        torch.manual_seed(0)
        self.module = wrap(make().to(DEVICE))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.x = torch.randn(BATCH, *shape, device=DEVICE)
        self.y = torch.randint(0, 10, (BATCH,), device=DEVICE)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.module(self.x), self.y).backward()
        self.optimizer.step()


def turns(contestants: dict[str, Callable[[], None] | None], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's call, in turns; None takes no part."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 2):
        for name, one in contestants.items():
            torch.cuda.synchronize()
            runtime.barrier()
            began_s = time.perf_counter()
            for _ in range(BLOCK if one else 0):
                one()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - began_s) / BLOCK)
            runtime.barrier()
    return {name: values[2:] for name, values in seconds.items()}


def show(title: str, seconds: dict[str, list[float]], peer: str) -> dict[str, Any]:
    """Print a table, and return what a row of results says of it."""
    lines, ratios = [("way", "median ms", f"ratio to {peer}", "95 % interval")], {}
    for name, values in seconds.items():
        ratios[name] = middle, low, high = median_ratio(values, seconds[peer])
        lines.append(
            (name, f"{statistics.median(values) * 1e3:.2f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
        )
    print(f"\n{title}")
    print(table(lines), flush=True)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    return {"median_ms": medians, f"ratio_to_{peer}": ratios}


def record(row: dict[str, Any]) -> None:
    """Where and how it was measured goes with it."""
    about = {"gpu": torch.cuda.get_device_name(DEVICE), "direct": adds_on_device(), "ranks": runtime.size}
    write_row("gpu", about | {"mpi": runtime.library} | row)


def exchanges(megabytes: list[float], rounds: int, ours: Any, gloo: Any) -> None:
    """All-reduces of device tensors."""
    for size in megabytes:
        tensor = torch.zeros(int(size * 1e6 / 4), device=DEVICE)
        host = torch.zeros_like(tensor, device="cpu").pin_memory()

        def copies(tensor: torch.Tensor = tensor, host: torch.Tensor = host) -> None:
            host.copy_(tensor)
            tensor.copy_(host)

        found = turns(
            {
                "gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=gloo),
                "ours": lambda tensor=tensor: dist.all_reduce(tensor, group=ours),
                "host": lambda host=host: dist.all_reduce(host, group=ours),
                "copies": copies,
            },
            rounds,
        )
        if runtime.rank == 0:
            record(
                {"what": "all_reduce", "megabytes": size} | show(f"all_reduce of {size:g} MB", found, "gloo")
            )


def steps(names: list[str], rounds: int, ours: Any, gloo: Any) -> None:
    """Training steps."""
    for name in names:
        found = turns(
            {
                "alone": Stepping(name) if runtime.rank == 0 else None,
                "side by side": Stepping(name),
                "gloo": Stepping(name, lambda module: data_parallel(module, gloo)),
                "ours": Stepping(name, lambda module: data_parallel(module, ours)),
            },
            rounds,
        )
        if runtime.rank == 0:
            numbers = sum(parameter.numel() for parameter in ALL_MODELS[name][0]().parameters())
            title = f"a step of {name}, {numbers / 1e6:.1f} million parameters, batch {BATCH}"
            record({"what": "step", "model": name} | show(title, found, "gloo"))


def class_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def samples(name: str) -> dict[str, torch.Tensor]:
    """In host memory."""
    torch.manual_seed(0)
    return {"x": torch.randn(NUM_SAMPLES, *ALL_MODELS[name][1]), "y": torch.randint(0, 10, (NUM_SAMPLES,))}


def plain(name: str, epochs: int) -> float:
    """Samples a second of a loop of torch, after its first epoch."""
    torch.manual_seed(0)
    module = ALL_MODELS[name][0]().to(DEVICE)
    optimizer, began_s = momentum(module.parameters()), 0.0
    data = samples(name)
    for epoch in range(epochs):
        if epoch == 1:
            torch.cuda.synchronize()
            began_s = time.perf_counter()
        order = torch.randperm(NUM_SAMPLES)
        for chosen in order.split(BATCH):
            x, y = (tensor[chosen].pin_memory().to(DEVICE, non_blocking=True) for tensor in data.values())
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    torch.cuda.synchronize()
    return (epochs - 1) * NUM_SAMPLES / (time.perf_counter() - began_s)


def trained(name: str, epochs: int) -> float:
    """Samples a second of a run, as its figure of merit says."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = {key: tensor.numpy() for key, tensor in samples(name).items()}
        write_shard(Path(folder) / "train-0.h5", arrays, np.arange(NUM_SAMPLES), BATCH)
        job = mt.Job(
            model=ALL_MODELS[name][0], loss=class_loss, optimizer=momentum, data=mt.Shards(f"{folder}/*.h5"),
            batch_size=BATCH, epochs=epochs, checkpoint_every="never",
        )  # fmt: skip
        return float(mt.train(job, mt.AllReduce(), run_dir=f"{folder}/run", quiet=True)["samples_per_second"])


def whole_runs(names: list[str], rounds: int, epochs: int) -> None:
    """A plain loop and runs of one rank, in turns."""
    for name in names:
        rates: dict[str, list[float]] = {"torch": [], "mpitrain": []}
        for _ in range(rounds):
            rates["torch"].append(plain(name, epochs))
            rates["mpitrain"].append(trained(name, epochs))
        inverse = {way: [1 / rate for rate in values] for way, values in rates.items()}
        record({"what": "run", "model": name} | show(f"one sample of a run of {name}", inverse, "torch"))


def main() -> None:
    """Measure what this number of ranks can."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12, help="of a whole run on one rank")
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 25, 100])
    parser.add_argument("--model", nargs="*", choices=list(ALL_MODELS), default=["mlp", "cnn", "wide"])
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    if runtime.size == 1:
        whole_runs(options.model, min(options.rounds, 5), options.epochs)
    else:
        dist.init_process_group("mpi4py")
        gloo = dist.new_group(backend="gloo")
        never_destroyed(gloo)
        exchanges(options.megabytes, options.rounds, dist.group.WORLD, gloo)
        steps(options.model, options.rounds, dist.group.WORLD, gloo)
    runtime.finish()


if __name__ == "__main__":
    main()
