"""What does a training step of a large embedding cost two workers whose table lives elsewhere than on both of them?

    mpitrain launch -n 4 benchmarks/tables.py [--rounds 5] [--rows 10000 4000000] [--batch 64 512] [--hidden 64]

One table of 16 columns, 8 words a sample drawn by Zipf's law (exponent 1), a dense tower of `--hidden` units, SGD, one
torch thread a rank. Ranks 0 and 1 are servers where there are servers, ranks 2 and 3 workers. The ways take turns:

    gloo dense   torch's DDP over gloo on the two workers, whole gradients: the peer
    all-to-all   half of the rows on each worker: ids, rows and gradients by all_to_all over gloo, the tower by DDP
                 (as TorchRec shards a table by rows)
    rpc          half of the rows on each server as a remote module of torch.distributed.rpc, distributed autograd and
                 optimizer, the tower by DDP over gloo (as torch's tutorial combines the two)
    sync         `mpitrain.train` under sync(servers=2) with a ServedEmbedding, reading of data included
    hybrid       the same under hybrid(servers=2): the tower by an all-reduce between the workers
    async        the same under async(servers=2): a step is one batch of each worker

Every run of ours begins with rows that nobody has asked for, which costs more than rows that are there. Bytes are those
of one step, each worker's pushes and their answers as the servers have counted them, beside the rows that a batch
touches times (64 bytes and an id as it was coded). Under `sync` they hold the tower as well.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import TRAINING, Command, Measurement
from measuring.ranking import WIDTH, WORDS, Batches, Ranking, RemoteTables, tower
from measuring.served_ranking import Trained
from torch import nn

from mpitrain.embedding.lookups import HeldRows
from mpitrain.embedding.sections import What
from mpitrain.mpi.runtime import start
from mpitrain.training.synchronous.ddp import data_parallel

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo", "all-to-all over gloo", "torch RPC"),
    depends=TRAINING,
    keys=("rows", "batch", "hidden=0"),
    figures=("gloo_dense_over.*", "sync_over_hybrid"),
    commands=(
        Command("mpitrain launch -n 4 benchmarks/tables.py", minutes=6, covers={"hidden": (64, 0)}),
        Command(
            "mpitrain launch -n 4 benchmarks/tables.py --rows 4000000 --batch 64 --hidden 100000",
            minutes=4,
            covers={"hidden": 100000},
        ),
    ),
)

runtime = start()
SERVERS = 2
WORKER = runtime.rank - SERVERS  # below 0 on servers


class Way(Batches):
    """`step()` is one training step of this worker."""

    def __init__(self, rows, batch):
        super().__init__(rows, batch, WORKER)


class Dense(Way):
    def __init__(self, rows, batch, group):
        super().__init__(rows, batch)
        self.model = data_parallel(Ranking(nn.EmbeddingBag(rows, WIDTH, mode="sum"), options.hidden), group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        never_destroyed(self.model)

    def step(self, words, clicked):
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(self.model(words), clicked).backward()
        self.optimizer.step()


class AllToAll(Way):
    """Row r lies on worker r mod 2."""

    def __init__(self, rows, batch, group):
        super().__init__(rows, batch)
        self.group = group
        self.table = torch.zeros(-(-rows // SERVERS), WIDTH).normal_(std=0.01)
        self.tower = data_parallel(tower(options.hidden), group)
        never_destroyed(self.tower)
        self.optimizer = torch.optim.SGD(self.tower.parameters(), lr=0.01)

    def _swap(self, values, sent, received):
        found = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(found, values, received, sent, group=self.group)
        return found

    def step(self, words, clicked):
        unique, places = torch.unique(words, return_inverse=True)
        order = torch.argsort(unique % SERVERS, stable=True)
        ids = unique[order]
        sent = torch.bincount(ids % SERVERS, minlength=SERVERS)
        counts = torch.empty_like(sent)
        dist.all_to_all_single(counts, sent, group=self.group)
        to, back = sent.tolist(), counts.tolist()
        asked = self._swap(ids // SERVERS, to, back)
        rows = torch.empty(len(ids), WIDTH)
        rows[order] = self._swap(self.table[asked], back, to)
        rows.requires_grad_()
        self.optimizer.zero_grad(set_to_none=True)
        bags = nn.functional.embedding_bag(places, rows, mode="sum")
        nn.functional.binary_cross_entropy_with_logits(self.tower(bags), clicked).backward()
        self.optimizer.step()
        gradients = self._swap(rows.grad[order], to, back)
        self.table.index_add_(0, asked, gradients, alpha=-0.01 / SERVERS)


def remote(rows, batch, group):
    """Half of the rows on each server, as a remote module."""
    way = RemoteTables(
        rows, batch, WORKER, SERVERS, options.hidden, lambda module: data_parallel(module, group)
    )
    never_destroyed(way.tower)
    return way


class Counter:
    """Rows that this worker has pushed, and the bytes of their ids."""

    def __init__(self):
        self.num_rows = self.id_bytes = self.num_pushes = 0
        self._pushed, counter = HeldRows.pushed, self

        def pushed(rows):
            found = counter._pushed(rows)
            counter.count(rows.lookups, found)
            return found

        HeldRows.pushed = pushed

    def count(self, lookups, found):
        from mpitrain.codecs.index_coding import encode

        self.num_pushes += 1
        for server, sections in enumerate(found):
            for section in sections:
                if section.what == What.ROWS:
                    self.num_rows += len(section.slots)
                    self.id_bytes += len(encode(section.slots, lookups.sizes(server)[0])[1])


def others(rows, batch, group):
    """The ways that are no whole runs, on workers; a server keeps its part of `rpc` alone."""
    return {} if WORKER < 0 else {name: kind(rows, batch, group) for name, kind in OTHERS.items()}


OTHERS = {"gloo dense": Dense, "all-to-all": AllToAll, "rpc": remote}


def measure(rows, batch, group):
    ways = others(rows, batch, group)
    trained = {
        name: Trained(runtime, rows, batch, options.hidden, f"{name}(servers=2)")
        for name in ("sync", "hybrid", "async")
    }
    seconds = {name: [] for name in (*OTHERS, *trained)}
    sizes: dict[str, dict[str, float]] = {}
    for number in range(options.rounds + 1):
        for name in OTHERS:
            num_steps = options.block if name == "gloo dense" else 8 * options.block
            runtime.barrier()
            began_s = time.perf_counter()
            if name in ways:
                ways[name].run(num_steps)
            runtime.barrier()
            seconds[name].append((time.perf_counter() - began_s) / num_steps)
        for name, way in trained.items():
            counter.num_rows = counter.id_bytes = counter.num_pushes = 0
            speed = way.run((64 if name == "async" else 32) * options.block)
            seconds[name].append(2 * batch / speed)  # of one step of both workers
            if name != "async" and number == 0:
                sizes[name] = traffic(way.result)
    return {name: values[1:] for name, values in seconds.items()}, sizes


def traffic(result):
    """Bytes of one worker's pushes and answers a step, and what rows and ids of a step take."""
    counted = runtime.allgather([counter.num_rows, counter.id_bytes, counter.num_pushes])
    rows, ids, pushes = (sum(one[at] for one in counted) for at in range(3))
    if runtime.rank:
        return {}
    servers = [one for one in result["ranks"] if one["role"] == "server"]
    steps = max(1, pushes)
    return {
        "pushed_bytes": sum(one["pushed_bytes"] for one in servers) / steps,
        "replied_bytes": sum(one["replied_bytes"] for one in servers) / steps,
        "touched_rows": rows / steps, "row_bytes": (rows * WIDTH * 4 + ids) / steps,
    }  # fmt: skip


def show(rows, batch, seconds, sizes):
    whole = rows * WIDTH * 4
    lines = [("way", "median ms", "gloo dense over it (95 %)")]
    ratios = {}
    for name, values in seconds.items():
        ratios[name] = middle, low, high = median_ratio(seconds["gloo dense"], values)
        lines.append(
            (name, f"{statistics.median(values) * 1e3:.2f}", f"{middle:.2f} ({low:.2f} - {high:.2f})")
        )
    print(
        f"\n{rows:,} rows of {WIDTH}, batch {batch} x {WORDS} words, {options.hidden} units, {options.rounds} rounds"
    )
    print(table(lines))
    for name, of in sizes.items():
        print(
            f"{name}: a step pushes {of['touched_rows']:,.0f} rows, {of['row_bytes']:,.0f} bytes with their ids, "
            f"{of['pushed_bytes']:,.0f} pushed, {of['replied_bytes']:,.0f} answered, of a table of {whole:,}",
            flush=True,
        )
    row = {
        "rows": rows, "batch": batch, "words": WORDS, "width": WIDTH, "rounds": options.rounds, "block": options.block,
        "hidden": options.hidden,
        "median_ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "gloo_dense_over": ratios, "dense_bytes": whole, **sizes["sync"], "hybrid": sizes["hybrid"],
        "sync_over_hybrid": median_ratio(seconds["sync"], seconds["hybrid"]),
    }  # fmt: skip
    write_row("tables", row)


def read_options():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--hidden", type=int, default=64)
    return parser.parse_args()


def main():
    from torch.distributed import rpc

    assert runtime.size == 4, "start with 4 ranks"
    torch.set_num_threads(1)
    start_gloo(runtime)
    group = dist.new_group([2, 3], backend="gloo")
    store = runtime.broadcast(tempfile.mktemp() if runtime.rank == 0 else None)
    rpc.init_rpc(
        f"rank{runtime.rank}", rank=runtime.rank, world_size=runtime.size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=4),
    )  # fmt: skip
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    for rows in options.rows:
        for batch in options.batch:
            seconds, sizes = measure(rows, batch, group)
            if runtime.rank == 0:
                show(rows, batch, seconds, sizes)
    runtime.barrier()
    rpc.shutdown()
    never_destroyed(group)
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    options, counter = read_options(), Counter()
    main()
