"""How long does one training step take on two workers, by each way of making them one job?

    mpitrain launch -n 3 benchmarks/step_time.py [--rounds 36] [--model mlp|cnn]

Ranks 0 and 1 train; rank 2 serves when it is the asynchronous strategy's turn and sleeps otherwise. A step is
zero_grad, forward, backward, exchange, SGD with momentum, on a fixed batch, one torch thread a rank. The ways
take turns in blocks of a few steps:

    one process     rank 0 alone: no exchange (the bound, as long as cores are free)
    side by side    both at once, no exchange (the bound of two that share caches and memory)
    Allreduce       one blocking Allreduce of as many bytes, and no step
    DDP alone       torch's DDP with a hook that sends nothing: its own work, with both at once
    gloo            torch's DDP over gloo: the peer
    allreduce       torch's DDP over our process group
    bare mpi4py     backward, then one flat blocking Allreduce
    async           push to and pull from the server every step; both workers at once

What fault tolerance and checkpoints add to a step is asked of whole runs: `tolerance_cost.py`.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import TRAINING, Command, Measurement
from measuring.models import BATCH, MODELS
from measuring.turns import take_turns
from torch import nn

from mpitrain.model import FlatModel, Replica, ShardStore
from mpitrain.model.recipe import GradientRule
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.runtime import start
from mpitrain.mpi.world import MpiWorld
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Rhythm, Server, Worker
from mpitrain.strategies import Async
from mpitrain.strategies.placement import Roles
from mpitrain.training.synchronous.ddp import data_parallel

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo", "bare mpi4py"),
    bound="the step of one process, and of two side by side",
    depends=TRAINING,
    keys=("model",),
    figures=("ratio_to_gloo.allreduce", "ratio_to_gloo.async"),
    commands=(Command("mpitrain launch -n 3 benchmarks/step_time.py", minutes=5),),
)

ROLES = Roles(servers=(2,), workers=(0, 1))


class Contestant:
    """A model of its own with its optimizer; `step()` is one training step."""

    def __init__(self, make, shape):
        torch.manual_seed(0)
        self.module = make()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.x, self.y = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))

    def backward(self, module):
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(module(self.x), self.y)
        loss.backward()
        return loss

    def step(self):
        self.backward(self.module)
        self.optimizer.step()


class Parallel(Contestant):
    """torch's DDP over the given group."""

    def __init__(self, make, shape, wrap):
        super().__init__(make, shape)
        self.parallel = wrap(self.module)

    def step(self):
        self.backward(self.parallel)
        self.optimizer.step()


class Alone(Parallel):
    """DDP whose buckets are done as soon as they are full: each rank goes by its own gradients."""

    def __init__(self, make, shape, wrap):
        super().__init__(make, shape, wrap)
        self.parallel.register_comm_hook(None, keep_bucket)


def keep_bucket(_, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Exchange(Contestant):
    """One blocking Allreduce of the model's gradients, and nothing else."""

    def __init__(self, make, shape, comm):
        super().__init__(make, shape)
        self.comm = comm
        self.flat = torch.zeros(sum(p.numel() for p in self.module.parameters())).numpy()

    def step(self):
        self.comm.Allreduce(MPI.IN_PLACE, [self.flat, MPI.FLOAT])


class Bare(Contestant):
    """One flat Allreduce after backward, by hand."""

    def __init__(self, make, shape, comm):
        super().__init__(make, shape)
        self.comm = comm
        parameters = list(self.module.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        self.views = [
            v.view_as(p)
            for v, p in zip(self.flat.split([p.numel() for p in parameters]), parameters, strict=True)
        ]

    def step(self):
        self.backward(self.module)
        gradients = [parameter.grad for parameter in self.module.parameters()]
        torch._foreach_copy_(self.views, gradients)
        self.comm.Allreduce(MPI.IN_PLACE, [self.flat.numpy(), MPI.FLOAT])
        self.flat.div_(2)
        torch._foreach_copy_(gradients, self.views)
        self.optimizer.step()


class Asynchronous(Contestant):
    """Our worker against the server on rank 2, driven as `mt.wrap` drives it."""

    def __init__(self, make, shape, engine):
        super().__init__(make, shape)
        flat = FlatModel(self.module, self.optimizer, 1)
        self.replica = Replica(flat, GradientRule(), None, runtime.rank)
        self.world = MpiWorld(engine, ROLES.servers, lambda source, kind: flat.buffer_for(0, final=True))
        self.role = Worker(runtime.rank, ROLES, self.replica, NullReport(), Rhythm(leased=False)).run()
        self.world.advance(self.role, None)

    def step(self):
        loss = self.backward(self.module)
        self.world.advance(self.role, self.replica.collect(float(loss.detach()), BATCH))


def serve(make, shape, engine):
    contestant = Contestant(make, shape)
    flat = FlatModel(contestant.module, contestant.optimizer, 1)
    store = ShardStore(flat.layout, 0, flat.wire_buffers[0].body, contestant.optimizer)
    server = Server(Async(), store, ROLES.workers, NullReport())
    MpiWorld(engine, ROLES.workers, lambda source, kind: store.wire_buffer()).run(server.run())


def sleep_until(request):
    while not request.Test():
        time.sleep(0.0005)


def measure(name, options, groups, pair, engine):
    make, shape = MODELS[name]
    if runtime.rank == 2:
        serve(make, shape, engine)
        return None
    ours, gloo = groups
    asynchronous = Asynchronous(make, shape, engine)
    contestants = {
        "one process": Contestant(make, shape) if runtime.rank == 0 else None,
        "side by side": Contestant(make, shape),
        "Allreduce": Exchange(make, shape, pair),
        "DDP alone": Alone(make, shape, lambda m: data_parallel(m, gloo)),
        "gloo": Parallel(make, shape, lambda m: data_parallel(m, gloo)),
        "allreduce": Parallel(make, shape, lambda m: data_parallel(m, ours)),
        "bare mpi4py": Bare(make, shape, pair),
        "async": asynchronous,
    }
    steps = {key: one.step if one else None for key, one in contestants.items()}

    def together():
        sleep_until(pair.Ibarrier())  # the other one may not have finished: rank 0 alone, or async

    seconds = take_turns(steps, options.rounds, options.block, ready=together, done=together, num_warm_up=2)
    asynchronous.world.advance(asynchronous.role, None)
    return seconds


def show(name, seconds, options):
    lines = [("way", "median ms", "ratio to gloo", "95 % interval")]
    ratios = {}
    for key, values in seconds.items():
        ratios[key] = middle, low, high = median_ratio(values, seconds["gloo"])
        lines.append(
            (key, f"{statistics.median(values) * 1e3:.1f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
        )
    side, exchange = seconds["side by side"], seconds["Allreduce"]
    bounds = {
        "side by side": median_ratio(seconds["allreduce"], side),
        "side by side + Allreduce": median_ratio(
            seconds["allreduce"], [a + b for a, b in zip(side, exchange)]
        ),
        "DDP alone + Allreduce": median_ratio(
            seconds["allreduce"], [a + b for a, b in zip(seconds["DDP alone"], exchange)]
        ),
    }
    numbers = sum(parameter.numel() for parameter in MODELS[name][0]().parameters())
    rounds = f"{options.rounds} rounds of {options.block} steps"
    print(f"\n{name}: {numbers / 1e6:.2f} million parameters, batch {BATCH}, {rounds}")
    print(table(lines))
    for bound, (middle, low, high) in bounds.items():
        print(f"allreduce over {bound}: {middle:.3f} ({low:.3f} - {high:.3f})", flush=True)
    medians = {key: statistics.median(values) * 1e3 for key, values in seconds.items()}
    row = {
        "model": name,
        "rounds": options.rounds,
        "block": options.block,
        "median_ms": medians,
        "ratio_to_gloo": ratios,
        "allreduce_over": bounds,
    }
    write_row("step_time", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--block", type=int, default=3)
    parser.add_argument("--model", choices=sorted(MODELS), default=None)
    options = parser.parse_args()
    assert runtime.size == 3, "start with 3 ranks"
    torch.set_num_threads(1)
    pair = runtime.comm.Split(0 if runtime.rank < 2 else MPI.UNDEFINED, runtime.rank)
    engine = Engine(runtime.comm.Dup())  # driven inline; the process group's own engine sleeps meanwhile
    start_gloo(runtime)
    groups = dist.new_group([0, 1], backend="mpi4py"), dist.new_group([0, 1], backend="gloo")
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    for name in [options.model] if options.model else ["mlp", "cnn"]:
        seconds = measure(name, options, groups, pair, engine)
        if runtime.rank == 0:
            show(name, seconds, options)
    never_destroyed(groups[1])
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
