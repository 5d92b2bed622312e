"""How fast is each collective, beside gloo, bare mpi4py and what the links allow?

    mpitrain launch -n 2 benchmarks/collectives.py [--sizes 4,64KB,25MB] [--only allreduce,bf16] [--rounds 7]
    .venv/bin/python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python \
        benchmarks/collectives.py --sizes 25MB

The table is OSU's: time of one call, algorithm bandwidth (bytes of the tensor over time), bus bandwidth (what each
link carried over time: 2 (n - 1)/n of the tensor in an allreduce, (n - 1)/n in the others; NCCL's definition). The
ways take turns in every round; ratios are medians of the pairs of one round. `bound` is what a raw socket stream from
each host to the next takes for the bytes that each link has to carry: measured between hosts only. `empty` is a
process group in Python that does nothing, and `unchecked` one that only calls the library's blocking Allreduce: it sees
no signal, no timeout, and no rank that calls something else.
`bf16` is the allreduce of a float32 tensor on a 16-bit wire, its bound that of half the bytes; gloo's turn is its
float32 allreduce.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import my_address, start_gloo
from measuring.measurement import BASICS, Command, Measurement
from torch._C._distributed_c10d import Work

from mpitrain.mpi.memory import buffers
from mpitrain.mpi.runtime import start

runtime = start()  # before mpi4py.MPI is imported: it chooses the thread level
from mpi4py import MPI  # noqa: E402

MEASUREMENT = Measurement(
    contestants=("gloo", "bare mpi4py"),
    bound="a raw stream of the bytes that each link has to carry",
    depends=(*BASICS, "mpitrain/devices", "mpitrain/mpi"),
    keys=("hosts", "link", "ranks"),
    figures=("rows.*.ratio_to_gloo",),
    commands=(
        Command("mpitrain launch -n 2 benchmarks/collectives.py", minutes=6, covers={"hosts": 1, "ranks": 2}),
        Command("mpitrain launch -n 4 benchmarks/collectives.py", minutes=6, covers={"hosts": 1, "ranks": 4}),
        Command(
            "python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python "
            "benchmarks/collectives.py --sizes 25MB --only allreduce,bf16",
            minutes=5,
            covers={"hosts": 4, "link": "100mbit"},
        ),
        Command(
            "python benchmarks/measuring/hosts.py run --hosts 4 --rate 1gbit .venv/bin/python "
            "benchmarks/collectives.py --sizes 4MB,25MB --only allreduce,bf16",
            minutes=2,
            covers={"hosts": 4, "link": "1gbit"},
        ),
    ),
)

SIZES = "4,64,1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB"
NAMES = ("allreduce", "bf16", "broadcast", "allgather", "reduce_scatter", "alltoall", "sendrecv", "barrier")
WAYS = ("mpitrain", "gloo", "bare mpi4py", "empty", "unchecked", "bound")
WARMUP_ROUNDS = 3  # in which the number of repeats grows with how fast the call turns out to be


def parse_bytes(text):
    """4, 64KB (1024), 25MB (as torch's DDP counts: 1024 x 1024)."""
    for unit, factor in (("KB", 1024), ("MB", 1024**2)):
        if text.upper().endswith(unit):
            return int(text[:-2]) * factor
    return int(text)


def on_links(name, num_bytes, size):
    """Bytes that each rank has to send at least."""
    share = (size - 1) / size
    if name == "bf16":
        return share * num_bytes  # two passes over half the bytes
    return {"allreduce": 2 * share, "broadcast": 1.0, "sendrecv": 1.0}.get(name, share) * num_bytes


class Streams:
    """A raw TCP stream from every host's first rank to the next host's, all at once: the bound."""

    def __init__(self):
        self.first = runtime.nodes.index(runtime.nodes[runtime.rank]) == runtime.rank
        leaders = [runtime.nodes.index(node) for node in range(runtime.num_nodes)]
        server = socket.create_server((my_address(runtime), 0))
        places = runtime.allgather(list(server.getsockname()[:2]))
        if self.first:
            after = leaders[(leaders.index(runtime.rank) + 1) % len(leaders)]
            self.out = socket.create_connection(tuple(places[after]))
            self.inward, _ = server.accept()

    def run(self, num_bytes):
        """Send and receive so many."""
        if not self.first:
            return
        block = bytearray(1 << 20)
        reader = threading.Thread(target=self._read, args=(num_bytes,))
        reader.start()
        left = num_bytes
        while left:
            left -= self.out.send(memoryview(block)[: min(left, len(block))])
        reader.join()

    def _read(self, left):
        block = bytearray(1 << 20)
        while left:
            left -= self.inward.recv_into(block, min(left, len(block)))


class Nothing(Work):
    """What the empty group returns."""

    def wait(self, timeout=None):
        return True


class EmptyGroup(dist.ProcessGroup):
    """Does nothing."""

    def allreduce(self, tensors, opts=None):
        return Nothing()


class UncheckedGroup(dist.ProcessGroup):
    """Calls the library, and does nothing else."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.comm = runtime.comm.Dup()

    def allreduce(self, tensors, opts=None):
        self.comm.Allreduce(MPI.IN_PLACE, buffers.of_plain(tensors[0]), MPI.SUM)
        return Nothing()


def calls(name, num_bytes, groups, comm, streams):
    """Way -> a function of no arguments that does it once; every way has tensors of its own."""
    ours, gloo, empty, unchecked = groups
    size, me = runtime.size, runtime.rank
    count = max(1, num_bytes // 4)
    part = -(-count // size)
    after, before = (me + 1) % size, (me - 1) % size

    def by_torch(group):
        whole, small, padded = torch.ones(count), torch.ones(part), torch.ones(part * size)
        other, got = torch.ones(part * size), torch.ones(count)

        def both():
            works = [
                dist.irecv(got, group=group, group_src=before),
                dist.isend(whole, group=group, group_dst=after),
            ]
            for work in works:
                work.wait()

        return {
            "allreduce": lambda: dist.all_reduce(whole.fill_(1) if count < 1000 else whole, group=group),
            "bf16": lambda: (
                group.allreduce_on_wire(whole, torch.bfloat16).wait()
                if group is ours
                else dist.all_reduce(whole, group=group)
            ),
            "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
            "allgather": lambda: dist.all_gather_single(padded, small, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(small, padded, group=group),
            "alltoall": lambda: dist.all_to_all_single(other, padded, group=group),
            "sendrecv": both,
            "barrier": lambda: dist.barrier(group=group),
        }[name]

    whole, small, padded = (
        torch.ones(count).numpy(),
        torch.ones(part).numpy(),
        torch.ones(part * size).numpy(),
    )
    other, got = padded.copy(), whole.copy()
    bare = {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: comm.Bcast(whole, 0),
        "allgather": lambda: comm.Allgather(small, padded),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(padded, small),
        "alltoall": lambda: comm.Alltoall(padded, other),
        "sendrecv": lambda: comm.Sendrecv(whole, after, 0, got, before, 0),
        "barrier": comm.Barrier,
    }
    found = {"mpitrain": by_torch(ours), "gloo": by_torch(gloo)}
    if name in bare:
        found["bare mpi4py"] = bare[name]
    if name == "allreduce":
        found["empty"], found["unchecked"] = by_torch(empty), by_torch(unchecked)
    if streams is not None:
        found["bound"] = lambda: streams.run(int(on_links(name, 4 * count, size)))
    return found


def measure(found, rounds, budget_s):
    """Way -> seconds of one call, one median a round; the slowest rank counts."""
    repeats = 1
    seconds = {way: [] for way in found}
    for number in range(rounds + WARMUP_ROUNDS):
        for way, call in found.items():
            runtime.barrier()
            began_s = time.perf_counter()
            for _ in range(repeats):
                call()
            took_s = max(runtime.allgather((time.perf_counter() - began_s) / repeats))
            if number >= WARMUP_ROUNDS:
                seconds[way].append(took_s)
            elif way == "mpitrain":
                repeats = max(1, min(1000, int(budget_s / (rounds * took_s))))
    return seconds


def row_of(name, num_bytes, seconds):
    middle_s = {way: statistics.median(values) for way, values in seconds.items()}
    links = on_links(name, num_bytes, runtime.size)
    row = {
        "collective": name,
        "bytes": num_bytes,
        "median_us": {way: value * 1e6 for way, value in middle_s.items()},
        "algorithm_MB_per_s": num_bytes / middle_s["mpitrain"] / 1e6,
        "bus_MB_per_s": links / middle_s["mpitrain"] / 1e6,
    }
    for way in seconds:
        if way != "mpitrain":
            row[f"ratio_to_{way.split()[0]}"] = median_ratio(seconds["mpitrain"], seconds[way])
    if "empty" in seconds:
        least_s = [sum(pair) for pair in zip(seconds["empty"], seconds["bare mpi4py"])]
        row["ratio_to_empty_and_bare"] = median_ratio(seconds["mpitrain"], least_s)
        row["unchecked_to_empty_and_bare"] = median_ratio(seconds["unchecked"], least_s)
    return row


def show(rows):
    head = (
        "collective",
        "bytes",
        *(f"{way} us" for way in WAYS),
        "alg MB/s",
        "bus MB/s",
        "/ gloo",
        "/ bare",
        "/ unchecked",
        "/ (empty + bare)",
        "/ bound",
    )
    lines = [head]
    for row in rows:
        middle = row["median_us"]
        ratios = [
            row.get(f"ratio_to_{way}") for way in ("gloo", "bare", "unchecked", "empty_and_bare", "bound")
        ]
        lines.append(
            (
                row["collective"], str(row["bytes"]), *(f"{middle[w]:.1f}" if w in middle else "-" for w in WAYS),
                f"{row['algorithm_MB_per_s']:.1f}", f"{row['bus_MB_per_s']:.1f}",
                *("-" if each is None else f"{each[0]:.2f}" for each in ratios),
            )
        )  # fmt: skip
    print(table(lines), flush=True)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one way at one size, roughly")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gloo, ours = start_gloo(runtime), dist.new_group(backend="mpi4py")
    groups = [ours, gloo]
    for backend, kind in (("empty", EmptyGroup), ("unchecked", UncheckedGroup)):
        dist.Backend.register_backend(
            backend, lambda store, rank, size, timeout, kind=kind: kind(rank, size), devices=["cpu"]
        )
        groups.append(dist.new_group(backend=backend))
    comm = runtime.comm.Dup()
    streams = Streams() if runtime.num_nodes > 1 else None
    told = ours.transport()
    rate = os.environ.get("MPITRAIN_LINK_RATE", "")
    if runtime.rank == 0:
        where = f"{runtime.size} ranks on {runtime.num_nodes} host(s) {rate}"
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores; {where}")
        print(told, flush=True)
    rows = []
    for name in options.only.split(","):
        for text in options.sizes.split(",") if name != "barrier" else "0":
            num_bytes = parse_bytes(text)
            seconds = measure(calls(name, num_bytes, groups, comm, streams), options.rounds, options.budget)
            rows.append(row_of(name, num_bytes, seconds))
    if runtime.rank == 0:
        show(rows)
        head = {"ranks": runtime.size, "hosts": runtime.num_nodes, "link": rate}
        write_row("collectives", {**head, "transport": told, "rows": rows})
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
