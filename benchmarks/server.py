"""How long does one push and pull through parameter servers take, and what does a server carry a second?

    mpitrain launch -n 7 benchmarks/server.py [--megabytes 0.0655 1 4 25 64] [--servers 1 2] [--rounds 30]
        [--compute-ms 0 1 20 60] [--apart]
    mpitrain launch -n 9 benchmarks/server.py --saturate [--rounds 7]

Rank 0 is one worker to each of three kinds of server, which have S ranks each and split the vector evenly:

    ours          our server and worker roles, driven as `mt.wrap` drives them
    bare mpi4py   Isend/Irecv of gradient and parameters, the torch operations of SGD with momentum between
    torch RPC     a parameter server as in torch's tutorials, over TensorPipe: a remote object whose method takes
                  the gradient, steps torch.optim.SGD and returns the parameters (rpc_sync; rpc_async and wait
                  with several servers)
    bytes only    bare mpi4py without the update: what copying there and back takes, the bound

They take turns in blocks, for every size and number of servers; whoever is not at turn sleeps. The gradient is
in place before the clock starts, and the new parameters are where the worker can use them when it stops. What a
server carries is 2 * bytes / time of one worker that never pauses, gradients in and parameters out. With
`--compute-ms` the worker multiplies matrices for so long before each push, off the clock: its caches hold those then,
and servers have had time to fall asleep. With `--apart` the main thread of the worker keeps to the first core, and
those of the servers to the others: the system's scheduler otherwise puts a worker and its server on one core for
seconds on end, and a push then waits for the other one's time slice.

With `--saturate` rank 0 is the server, and 1, 2, 4 and 8 of the others push 64 KB without computing: what it carries
then, and the processor time that a push takes it.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import statistics
import threading
import time
import warnings

import torch
import torch.distributed.rpc as rpc
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Command, Measurement
from torch import nn

from mpitrain.model import FlatModel, ShardStore
from mpitrain.model.recipe import GradientRule
from mpitrain.model.replicas.worker_replica import Gradient, Replica
from mpitrain.mpi.runtime import start
from mpitrain.mpi.world import MpiWorld
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Rhythm, Server, Worker
from mpitrain.strategies import Async
from mpitrain.strategies.placement import Roles

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

MEASUREMENT = Measurement(
    contestants=("bare mpi4py", "torch RPC"),
    bound="the same bytes there and back without an update",
    depends=TRAINING,
    keys=("megabytes", "servers=1", "compute_ms=0.0", "pushing=0", "apart=False"),
    figures=("ours_to_bare", "rpc_to_ours", "server_cpu_us.ours", "pushes_per_second.ours"),
    commands=(
        Command(
            "mpitrain launch -n 7 benchmarks/server.py",
            minutes=8,
            covers={"compute_ms": 0.0, "pushing": 0, "apart": False, "servers": (1, 2)},
        ),
        Command(
            "mpitrain launch -n 7 benchmarks/server.py --apart --megabytes 0.0655 1 25",
            minutes=5,
            covers={"compute_ms": 0.0, "apart": True},
        ),
        Command(
            "mpitrain launch -n 13 benchmarks/server.py --megabytes 25 --servers 4",
            minutes=2,
            covers={"servers": 4},
        ),
        Command(
            "mpitrain launch -n 4 benchmarks/server.py --megabytes 0.0655 --compute-ms 1 20 60",
            minutes=3,
            covers={"compute_ms": (1.0, 20.0, 60.0)},
        ),
        Command(
            "mpitrain launch -n 9 benchmarks/server.py --saturate --rounds 7",
            minutes=3,
            covers={"pushing": (1, 2, 4, 8)},
        ),
    ),
)

RATE, MOMENTUM = 0.01, 0.9
TURN_TAG, PUSH_TAG, PULL_TAG = 101, 102, 103
UPDATE, COPY, LEAVE = 1, 2, 0  # words to a bare server
DRIVER = 0
WAYS = ("ours", "bare mpi4py", "torch RPC", "bytes only")
# of `--saturate`: numbers of workers, the size of a push, and pushes of all workers in one turn
PUSHING, PUSHED_MEGABYTES, PUSHES = (1, 2, 4, 8), 0.0655, 2000


def parts(numel, num_servers):
    """Sizes of the servers' slices."""
    cuts = [numel * shard // num_servers for shard in range(num_servers + 1)]
    return [high - low for low, high in zip(cuts, cuts[1:])]


def flat_model(numel, num_servers):
    """One flat parameter under SGD with momentum; the optimizer is the prototype of the servers'."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(numel))
    module.weight.grad = torch.full((numel,), 2.0**-10)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    return module, optimizer, FlatModel(module, optimizer, num_servers)


def say(to, word, count=0):
    runtime.engine.wait(runtime.engine.isend(bytearray([word, count]), to, TURN_TAG))


def hear(source):
    """The next (word, count) of a rank; naps while there is none."""
    words = bytearray(2)
    runtime.engine.wait(runtime.engine.irecv(words, source, TURN_TAG, passive=True))
    return words


class Ready(Replica):
    """A replica whose gradient lies in its wire buffers before the clock starts, as the others' does: gathering it is
    measured by step_time.py.
    """

    def prepare(self):
        self.ready = self.model.push_buffers()
        self.model.gather_gradients(self.ready)

    def take_push(self):
        return [wire_buffer.hold() for wire_buffer in self.ready]


class Ours:
    """Our worker."""

    def __init__(self, numel, servers, workers=(DRIVER,)):
        self.servers = servers
        self.module, _, flat = flat_model(numel, len(servers))
        self.replica = Ready(flat, GradientRule(), None, runtime.rank)
        self.world = MpiWorld(
            runtime.engine, servers, lambda source, kind: flat.buffer_for(servers.index(source), final=True)
        )
        roles, rhythm = Roles(servers, workers), Rhythm(leased=False)
        self.role = Worker(runtime.rank, roles, self.replica, NullReport(), rhythm).run()
        self.world.advance(self.role, None)
        self.replica.prepare()

    def step(self):
        self.world.advance(self.role, Gradient(0.0, 1, True, 1.0))

    def leave(self):
        self.world.advance(self.role, None)
        for server in self.servers:  # it listens no more: what comes next is for its successor
            hear(server)


def serve_ours(numel, num_servers, shard, workers=(DRIVER,)):
    _, prototype, flat = flat_model(numel, num_servers)
    store = ShardStore(flat.layout, shard, flat.wire_buffers[shard].body, prototype)
    server = Server(Async(), store, workers, NullReport())
    MpiWorld(runtime.engine, workers, lambda source, kind: store.wire_buffer()).run(server.run())
    for worker in workers:
        say(worker, LEAVE)


class Bare:
    """A worker by hand; `word` tells the servers whether to update."""

    def __init__(self, numel, servers):
        sizes = parts(numel, len(servers))
        self.gradients = [part.numpy() for part in torch.full((numel,), 2.0**-10).split(sizes)]
        self.weights = [part.numpy() for part in torch.zeros(numel).split(sizes)]
        self.servers = servers

    def begin(self, word, count):
        for server in self.servers:
            say(server, word, count)

    def step(self):
        comm, requests = runtime.comm, []
        for server, gradient, weight in zip(self.servers, self.gradients, self.weights):
            requests.append(comm.Irecv([weight, MPI.FLOAT], server, PULL_TAG))
            requests.append(comm.Isend([gradient, MPI.FLOAT], server, PUSH_TAG))
        MPI.Request.Waitall(requests)

    def leave(self):
        self.begin(LEAVE, 0)


def serve_bare(numel):
    comm = runtime.comm
    gradient, weight, velocity = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    incoming, outgoing = gradient.numpy(), weight.numpy()
    while (words := hear(DRIVER))[0] != LEAVE:
        for _ in range(words[1]):
            comm.Irecv([incoming, MPI.FLOAT], DRIVER, PUSH_TAG).Wait()
            if words[0] == UPDATE:
                velocity.mul_(MOMENTUM).add_(gradient)
                weight.add_(velocity, alpha=-RATE)
            comm.Isend([outgoing, MPI.FLOAT], DRIVER, PULL_TAG).Wait()


def serve_many_bare(numel, workers, count):
    """So many pushes of each worker, whoever comes first; a velocity and a weight for all of them."""
    comm = runtime.comm
    gradients, weight, velocity = (
        [torch.zeros(numel) for _ in workers],
        torch.zeros(numel),
        torch.zeros(numel),
    )

    def listen(index):
        return comm.Irecv([gradients[index].numpy(), MPI.FLOAT], workers[index], PUSH_TAG)

    requests, left = [listen(index) for index in range(len(workers))], [count] * len(workers)
    for _ in range(count * len(workers)):
        index = MPI.Request.Waitany(requests)
        velocity.mul_(MOMENTUM).add_(gradients[index])
        weight.add_(velocity, alpha=-RATE)
        comm.Isend([weight.numpy(), MPI.FLOAT], workers[index], PULL_TAG).Wait()
        left[index] -= 1
        if left[index]:
            requests[index] = listen(index)


class RemoteServer:
    """The object of the RPC servers. Unlike the tutorial's it copies no gradient and returns a bare tensor
    instead of a module: the peer at its best.
    """

    def __init__(self, numel):
        self.weight = nn.Parameter(torch.zeros(numel))
        self.optimizer = torch.optim.SGD([self.weight], lr=RATE, momentum=MOMENTUM)

    @staticmethod
    def update_and_fetch(reference, gradient):
        self = reference.local_value()
        self.weight.grad = gradient
        self.optimizer.step()
        return self.weight.detach()


_shared, _turn = [], threading.Lock()  # the object that all workers push to, where rank 0 serves them


def update_shared(gradient):
    with _turn:  # as in torch's tutorial: RPC calls it in several threads
        server = _shared[0]
        server.weight.grad = gradient
        server.optimizer.step()
        return server.weight.detach()


class Remote:
    """A worker of RPC servers."""

    def __init__(self, numel, servers):
        sizes = parts(numel, len(servers))
        names = [rpc_name(server) for server in servers]
        self.servers = [
            rpc.remote(name, RemoteServer, args=(size,)) for name, size in zip(names, sizes, strict=True)
        ]
        self.gradients = [torch.full((size,), 2.0**-10) for size in sizes]
        self.weights = []

    def step(self):
        calls = [
            (server.owner(), RemoteServer.update_and_fetch, (server, gradient))
            for server, gradient in zip(self.servers, self.gradients, strict=True)
        ]
        if len(calls) == 1:
            self.weights = [rpc.rpc_sync(*calls[0])]
        else:
            self.weights = [future.wait() for future in [rpc.rpc_async(*call) for call in calls]]

    def leave(self):
        """The servers free their objects when the last reference goes."""
        self.servers.clear()


def rpc_name(rank):
    return f"rank{rank}"


def join_rpc(members):
    """Connect the ranks `members`, the driver first; everybody else only learns the port."""
    port = runtime.broadcast(_free_port() if runtime.rank == DRIVER else None)
    if runtime.rank not in members:
        return
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    # torch's own, at every start of its RPC
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(
        rpc_name(runtime.rank),
        rank=members.index(runtime.rank),
        world_size=len(members),
        rpc_backend_options=options,
    )


def block_of(megabytes, compute_ms):
    """Steps of a turn: more of the short ones."""
    return max(5, min(50, round(50 / megabytes), round(50 / max(compute_ms, 1))))


def compute(milliseconds):
    """Multiply matrices for so long."""
    end_s, matrix = time.perf_counter() + milliseconds / 1e3, torch.ones(200, 200)
    while time.perf_counter() < end_s:
        matrix @ matrix


def timed(step, count, compute_ms):
    """Median seconds of `count` steps."""
    seconds = []
    for _ in range(count):
        if compute_ms:
            compute(compute_ms)
        began_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def cpu_s(pid):
    """Processor time a process has used so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_share(pid, seconds):
    """Share of a core that a waiting process takes."""
    time.sleep(1)
    before_s = cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / seconds


def compare(megabytes, ranks, num_rounds, compute_ms):
    """One size on one number of servers: paired seconds by way. Leaves our servers up, see `Ours.leave`."""
    numel, block = int(megabytes * 1e6 / 4), block_of(megabytes, compute_ms)
    ours, bare, remote = Ours(numel, ranks[0]), Bare(numel, ranks[1]), Remote(numel, ranks[2])
    seconds = {way: [] for way in WAYS}
    for _ in range(num_rounds + max(1, num_rounds // 10)):
        seconds["ours"].append(timed(ours.step, block, compute_ms))
        bare.begin(UPDATE, block)
        seconds["bare mpi4py"].append(timed(bare.step, block, compute_ms))
        seconds["torch RPC"].append(timed(remote.step, block, compute_ms))
        bare.begin(COPY, block)
        seconds["bytes only"].append(timed(bare.step, block, compute_ms))
    check_alike(ours, bare, remote)
    bare.leave()
    remote.leave()
    return ours, {way: values[-num_rounds:] for way, values in seconds.items()}


def check_alike(ours, bare, remote):
    """All three have made the same updates: the parameters agree, to the order of rounding."""
    theirs = torch.cat([torch.from_numpy(part) for part in bare.weights])
    assert torch.allclose(ours.module.weight.detach(), theirs)
    assert torch.allclose(torch.cat(remote.weights), theirs)


def drive(options, ranks, pids):
    """Every cell; prints the tables and writes one row a cell."""
    print(
        f"push + pull, SGD with momentum, one host, {machine()['cpu']}, {machine()['num_cores']} cores, "
        f"{options.rounds} rounds",
        flush=True,
    )
    times = [("MB", "servers", "computes ms", *(f"{way} ms" for way in WAYS), "ours MB/s")]
    against = [("MB", "servers", "computes ms", "ours / bare", "95 %", "RPC / ours", "95 %")]
    idle = None
    for megabytes, num_servers, compute_ms in cells_of(options):
        served = [group[:num_servers] for group in ranks]
        ours, seconds = compare(megabytes, served, options.rounds, compute_ms)
        if idle is None and options.idle_s:
            idle = idle_share(pids[ranks[0][0]], options.idle_s)
        ours.leave()
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        carried = {way: 2 * megabytes / medians[way] for way in WAYS}
        to_bare = median_ratio(seconds["ours"], seconds["bare mpi4py"])
        gain = median_ratio(seconds["torch RPC"], seconds["ours"])
        cell = f"{megabytes:g}", str(num_servers), f"{compute_ms:g}"
        times.append((*cell, *(f"{medians[way] * 1e3:.2f}" for way in WAYS), f"{carried['ours']:.0f}"))
        ratios = [(f"{one[0]:.2f}", f"{one[1]:.2f} - {one[2]:.2f}") for one in (to_bare, gain)]
        against.append((*cell, *ratios[0], *ratios[1]))
        row = {
            "megabytes": megabytes, "servers": num_servers, "compute_ms": compute_ms, "rounds": options.rounds,
            "apart": options.apart, "block": block_of(megabytes, compute_ms),
            "median_ms": {way: medians[way] * 1e3 for way in WAYS},
            "megabytes_per_second": carried, "ours_to_bare": to_bare, "rpc_to_ours": gain, "idle_core": idle,
        }  # fmt: skip
        write_row("server", row)
    print(table(times))
    print()
    print(table(against))
    if idle is not None:
        print(f"our server, idle for {options.idle_s:g} s: {idle:.1%} of a core")


def pushes(way, numel, workers, count):
    """Rank 0 serves, `workers` push so often: how many pushes a second, and the server's processor time for one."""
    step = leave = None
    if runtime.rank in workers:
        if way == "ours":
            ours = Ours(numel, (DRIVER,), workers)
            step, leave = ours.step, ours.leave
        elif way == "bare mpi4py":
            step = Bare(numel, (DRIVER,)).step
        else:
            gradient = torch.full((numel,), 2.0**-10)
            step = functools.partial(rpc.rpc_sync, rpc_name(DRIVER), update_shared, args=(gradient,))
    if runtime.rank == DRIVER:
        _shared[:] = [RemoteServer(numel)]
        used_s = time.process_time()
        if way == "ours":
            serve_ours(numel, 1, 0, workers)
        elif way == "bare mpi4py":
            serve_many_bare(numel, workers, count)
    else:
        used_s = 0.0
    began_s = time.monotonic()
    for _ in range(count if step else 0):
        step()
    ended_s = time.monotonic()
    if leave:
        leave()
    times = [one for one in runtime.allgather([began_s, ended_s] if step else None) if one]
    used_s = runtime.broadcast(time.process_time() - used_s, DRIVER)
    num_pushes = count * len(workers)
    took_s = max(end_s for _, end_s in times) - min(begin_s for begin_s, _ in times)
    return num_pushes / took_s, used_s / num_pushes * 1e6


def saturate(options):
    """The ways in turn, for every number of workers; prints the table and writes one row a number."""
    numel = int(PUSHED_MEGABYTES * 1e6 / 4)
    rows = [("workers", *(f"{way}, pushes/s" for way in WAYS[:3]), *(f"{way}, CPU us" for way in WAYS[:3]))]
    for num_workers in [one for one in PUSHING if one < runtime.size]:
        workers, rates, cpu = tuple(range(1, num_workers + 1)), {}, {}
        for number in range(options.rounds + 1):
            for way in WAYS[:3]:
                rate, used_us = pushes(way, numel, workers, PUSHES // num_workers)
                if number:  # the first is warm-up
                    rates.setdefault(way, []).append(rate)
                    cpu.setdefault(way, []).append(used_us)
        row = {
            "megabytes": PUSHED_MEGABYTES, "servers": 1, "compute_ms": 0.0, "pushing": num_workers,
            "rounds": options.rounds, "pushes": PUSHES,
            "pushes_per_second": {way: statistics.median(values) for way, values in rates.items()},
            "server_cpu_us": {way: statistics.median(values) for way, values in cpu.items()},
            "ours_to_bare": median_ratio(rates["bare mpi4py"], rates["ours"]),
            "rpc_to_ours": median_ratio(rates["ours"], rates["torch RPC"]),
            "cpu_to_bare": median_ratio(cpu["ours"], cpu["bare mpi4py"]),
        }  # fmt: skip
        if runtime.rank == DRIVER:
            write_row("server", row)
        rows.append(
            (str(num_workers), *(f"{row['pushes_per_second'][way]:.0f}" for way in WAYS[:3]),
             *(f"{row['server_cpu_us'][way]:.0f}" for way in WAYS[:3]))
        )  # fmt: skip
    if runtime.rank == DRIVER:
        print(table(rows))


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0655, 1, 4, 25, 64])
    parser.add_argument(
        "--servers", type=int, nargs="+", help="default: 1 and up, as many as there are ranks for"
    )
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[0.0], help="before each push")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--idle-s", type=float, default=5, help="how long to look at the idle server, 0: not")
    parser.add_argument("--apart", action="store_true", help="worker and servers on cores of their own")
    parser.add_argument("--saturate", action="store_true", help="many workers that do not compute")
    options = parser.parse_args()
    if options.saturate:
        torch.set_num_threads(1)
        join_rpc(tuple(range(runtime.size)))
        saturate(options)
        rpc.shutdown()
        runtime.finish()
        return
    most = (runtime.size - 1) // 3
    options.servers = options.servers or list(range(1, most + 1))
    assert 1 <= max(options.servers) <= most, f"start with {1 + 3 * max(options.servers or [1])} ranks"
    torch.set_num_threads(1)
    ranks = [tuple(range(1 + kind * most, 1 + (kind + 1) * most)) for kind in range(3)]
    pids = runtime.allgather(os.getpid())
    members = (DRIVER, *ranks[2])
    join_rpc(members)
    if options.apart:
        keep_apart([] if runtime.rank == DRIVER else next(group for group in ranks if runtime.rank in group))
    runtime.barrier()
    if runtime.rank == DRIVER:
        drive(options, ranks, pids)
    for kind, serve in enumerate((serve_ours, serve_bare)):
        if runtime.rank in ranks[kind]:
            serve_cells(options, ranks[kind].index(runtime.rank), serve)
    if runtime.rank in members:
        rpc.shutdown()  # serves until the driver comes here too
    runtime.finish()


def keep_apart(group):
    """Bind this thread to the first core, or, of a server in `group`, to one of the others; threads that torch's RPC
    has started go where they like."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("--apart: there is one core only")
    core = others[group.index(runtime.rank) % len(others)] if group else first
    os.sched_setaffinity(0, {core})


def serve_cells(options, shard, serve):
    """A server rank's side of `drive`."""
    for megabytes, num_servers, _ in cells_of(options):
        numel = int(megabytes * 1e6 / 4)
        if shard >= num_servers:
            continue
        if serve is serve_ours:
            serve_ours(numel, num_servers, shard)
        else:
            serve_bare(parts(numel, num_servers)[shard])


def cells_of(options):
    """(megabytes, servers, milliseconds of computing) of each, in order."""
    return itertools.product(options.megabytes, options.servers, options.compute_ms)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
