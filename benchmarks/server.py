"""How long does one push and pull through a parameter server take, beside bare mpi4py doing the same?

    mpitrain launch -n 4 benchmarks/server.py [--megabytes 25] [--rounds 40]

Ranks 0 and 1 are our server and worker, ranks 2 and 3 a bare mpi4py pair: Isend/Irecv of the gradient, the
same torch operations of SGD with momentum on the server, Isend/Irecv of the parameters. The pairs take turns
in blocks; whoever is not at turn sleeps. The bound is what copying the bytes there and back takes: two
messages without any update between them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from common import machine, median_ratio, table, write_row
from torch import nn

from mpitrain.model import FlatModel, ShardStore
from mpitrain.model.replica import Replica
from mpitrain.mpi.runtime import start
from mpitrain.mpi.world import MpiWorld
from mpitrain.report import NullReport
from mpitrain.roles import Server, Worker
from mpitrain.rules import Async, Roles

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

RATE, MOMENTUM, IDLE_S = 0.01, 0.9, 5
TURN_TAG, PUSH_TAG, PULL_TAG = 101, 102, 103


def wait_turn(runtime, source):
    token = bytearray(1)
    runtime.engine.wait(runtime.engine.irecv(token, source, TURN_TAG, passive=True))
    return token[0]


def give_turn(runtime, to, word=1):
    runtime.engine.wait(runtime.engine.isend(bytearray([word]), to, TURN_TAG))


class Ours:
    """Our worker, driven as `mt.wrap` drives it."""

    def __init__(self, runtime, numel):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(numel))
        flat = FlatModel(module, torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM), 1)
        module.weight.grad = torch.full((numel,), 2.0**-10)
        self.module, self.replica = module, Replica(flat, None, None, None, 0, 1)
        self.world = MpiWorld(runtime.engine, (0,), lambda source, kind: flat.frame_for(0, final=True))
        self.role = Worker(1, Roles((0,), (1,)), self.replica, NullReport(), leased=False).run()
        self.world.advance(self.role, None)
        self.frames = flat.push_frames()
        flat.gather_gradients(self.frames)

    def step(self):
        from mpitrain.model.replica import Gradient

        # the gradient is in its frame already, as the bare pair's is: gathering it is measured by
        # step_time.py
        self.world.advance(self.role, Gradient(0.0, 1, True, [frame.hold() for frame in self.frames]))

    def leave(self):
        self.world.advance(self.role, None)


def serve(runtime, numel):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(numel))
    prototype = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    flat = FlatModel(module, prototype, 1)
    store = ShardStore(flat.layout, 0, flat.frames[0].body, prototype)
    server = Server(Async(), store, (1,), NullReport())
    MpiWorld(runtime.engine, (1,), lambda source, kind: store.frame()).run(server.run())


def bare_serve(runtime, numel, num_rounds, block):
    comm = runtime.comm
    gradient, weight, velocity = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    incoming, outgoing = gradient.numpy(), weight.numpy()
    while update := wait_turn(runtime, 3):
        for _ in range(block):
            comm.Irecv([incoming, MPI.FLOAT], 3, PUSH_TAG).Wait()
            if update == 1:
                velocity.mul_(MOMENTUM).add_(gradient)
                weight.add_(velocity, alpha=-RATE)
            comm.Isend([outgoing, MPI.FLOAT], 3, PULL_TAG).Wait()


def bare_block(runtime, gradient, weight, block, word):
    comm = runtime.comm
    give_turn(runtime, 2, word)
    seconds = []
    for _ in range(block):
        began_s = time.perf_counter()
        receive = comm.Irecv([weight, MPI.FLOAT], 2, PULL_TAG)
        comm.Isend([gradient, MPI.FLOAT], 2, PUSH_TAG).Wait()
        receive.Wait()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=25)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=5)
    options = parser.parse_args()
    assert runtime.size == 4, "start with 4 ranks"
    pids = runtime.allgather(os.getpid())
    numel = int(options.megabytes * 1e6 / 4)
    if runtime.rank == 0:
        serve(runtime, numel)
    elif runtime.rank == 2:
        bare_serve(runtime, numel, options.rounds, options.block)
    elif runtime.rank == 1:
        ours = Ours(runtime, numel)
        for _ in range(options.rounds):
            wait_turn(runtime, 3)
            seconds = []
            for _ in range(options.block):
                began_s = time.perf_counter()
                ours.step()
                seconds.append(time.perf_counter() - began_s)
            runtime.engine.wait(
                runtime.engine.isend(
                    bytearray(str(statistics.median(seconds)).ljust(32).encode()), 3, TURN_TAG
                )
            )
        wait_turn(runtime, 3)  # the server stays, idle, until its processor time has been looked at
        ours.leave()
    else:
        compare(runtime, options, numel, pids[0])
    runtime.finish()


def cpu_s(pid):
    """Processor time a process has used so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(runtime, options, numel, server_pid):
    gradient, weight = torch.full((numel,), 2.0**-10).numpy(), torch.zeros(numel).numpy()
    rows = {"ours": [], "bare mpi4py": [], "bound (bytes only)": []}
    for _ in range(options.rounds):
        give_turn(runtime, 1)
        answer = bytearray(32)
        runtime.engine.wait(runtime.engine.irecv(answer, 1, TURN_TAG, passive=True))
        rows["ours"].append(float(answer.decode()))
        rows["bare mpi4py"].append(bare_block(runtime, gradient, weight, options.block, 1))
        rows["bound (bytes only)"].append(bare_block(runtime, gradient, weight, options.block, 2))
    give_turn(runtime, 2, 0)
    time.sleep(1)
    before_s = cpu_s(server_pid)
    time.sleep(IDLE_S)
    idle = (cpu_s(server_pid) - before_s) / IDLE_S
    give_turn(runtime, 1)
    warm = options.rounds // 10
    rows = {name: values[warm:] for name, values in rows.items()}
    lines = [("push + pull", "median ms", "ratio to bare", "95 % interval")]
    ratios = {}
    for name, values in rows.items():
        middle, low, high = ratios[name] = median_ratio(values, rows["bare mpi4py"])
        lines.append(
            (name, f"{statistics.median(values) * 1e3:.2f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
        )
    print(
        f"{options.megabytes:g} MB, SGD with momentum, one host, {machine()['cpu']}, "
        f"{len(rows['ours'])} rounds of {options.block}"
    )
    print(table(lines))
    print(f"the server, idle for {IDLE_S} s: {idle:.1%} of a core")
    medians = {name: statistics.median(values) * 1e3 for name, values in rows.items()}
    path = write_row(
        "server",
        {
            "megabytes": options.megabytes,
            "median_ms": medians,
            "ratio_to_bare": ratios,
            "idle_core": idle,
            "mpi": runtime.library,
        },
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
