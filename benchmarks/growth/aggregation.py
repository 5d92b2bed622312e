"""What passes a server for each push, with aggregators and without, as the number of workers grows?

    python benchmarks/growth/aggregation.py [--workers 8] [--steps 40] [--rounds 1] [--sizes 32 1024 10240]
        [--per-node 64]

A small job is trained by so many workers and one server on this machine, with `aggregate="node"` and without, in turns;
the server's rank counts its messages, their bytes and its CPU seconds (`growth_rank.py`). Beside it, in virtual time
and without gradients, the same roles with many workers on nodes of `--per-node` ranks: what the server receives and
sends for each push, how many pushes a second there are, and how much of what the link of its node can carry passes it.
Workers on the server's own node do not pass that link, and under `async()` they push more often than the others.
Messages are counted by their headers: what follows one, a text or a payload, is a message of its own to MPI.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from growth import first_step, run_ranks
from measuring.common import make_parser, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement

from mpitrain.effects import Send
from mpitrain.messages import payload_bytes
from mpitrain.simulation.timing import Circumstances, Workload, time_run
from mpitrain.strategies.parameter_server.asynchronous import Async
from mpitrain.strategies.parameter_server.sync import Sync
from mpitrain.strategies.placement import assign_workers
from mpitrain.virtual import Cluster, Constant, Costs, VirtualWorld

MEASUREMENT = Measurement(
    depends=(*VIRTUAL, "mpitrain/cli", "mpitrain/launch", "jobs/digits.py"),
    commands=(Command("python benchmarks/growth/aggregation.py", minutes=5),),
)

STRATEGIES = (Sync(), Sync(aggregate="node"), Async(), Async(aggregate="node"))
NUMBERS = 1_000_000  # of the model that is only timed
GBIT_PER_S, COMPUTE_S, MEMORY_GB_PER_S = 10.0, 0.1, 10.0
TIMED_STEPS = 4


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--workers", type=int, default=8, help="of the runs on this machine")
    parser.add_argument("--steps", type=int, default=40, help="of each of them")
    parser.add_argument("--rounds", type=int, default=1, help="of all strategies, taking turns")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32, 128, 1024, 10_240], help="virtual workers"
    )
    parser.add_argument("--per-node", type=int, default=64, help="ranks of a virtual node")
    options = parser.parse_args()
    launches = [
        measured(str(strategy), options.workers, options.steps)
        for _ in range(options.rounds)
        for strategy in STRATEGIES
    ]
    virtual = [
        timed(strategy, workers, options.per_node) for workers in options.sizes for strategy in STRATEGIES
    ]
    head = ("strategy", "workers", "messages", "bytes", "CPU ms")
    print(table([head, *(line_of(found) for found in launches)]))
    head = (
        "strategy",
        "workers",
        "nodes",
        "messages in",
        "out",
        "bytes in",
        "out",
        "pushes/s",
        "of the link",
    )
    print(table([head, *(virtual_line_of(found) for found in virtual)]))
    settings = {
        "numbers": NUMBERS, "gbit_per_s": GBIT_PER_S, "compute_s": COMPUTE_S, "per_node": options.per_node,
        "memory_gb_per_s": MEMORY_GB_PER_S,
    }  # fmt: skip
    write_row("aggregation", {"rounds": options.rounds, "launches": launches, "virtual": virtual, **settings})


def measured(text: str, workers: int, steps: int) -> dict[str, Any]:
    """What the server's rank has cost between its first step and its last, for each push."""
    ranks = workers + 1 + ("aggregate" in text)
    with tempfile.TemporaryDirectory() as folder:
        _, rows, result = run_ranks(Path(folder), "run-of-it", text, ranks, steps)
    (server,) = [row for row in rows if row["role"] == "server"]
    ends = {one["stage"]: one for one in server["stages"]}["trained"]
    cost = {key: ends[key] - first_step(server)[key] for key in ("messages", "bytes", "cpu_s")}
    return {
        "strategy": text, "workers": result["workers"], "pushes": result["accepted"],
        **{key: value / result["accepted"] for key, value in cost.items()},
    }  # fmt: skip


class Counts:
    """What one rank of virtual worlds sends and is sent."""

    def __init__(self, rank: int, nodes: Sequence[int]):
        self.rank, self.nodes = rank, nodes
        self.link_in = self.link_out = 0  # bytes from and to other nodes
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0

    def __enter__(self) -> Counts:
        self.before = VirtualWorld._send

        def send(world: VirtualWorld, source: int, effect: Send) -> None:
            if self.rank in (source, effect.to):
                way, num_bytes = "out" if source == self.rank else "in", payload_bytes(effect.message)
                self.add(way, num_bytes)
                if self.nodes[source] != self.nodes[effect.to]:
                    setattr(self, f"link_{way}", getattr(self, f"link_{way}") + num_bytes)
            self.before(world, source, effect)

        VirtualWorld._send = send  # type: ignore[method-assign]
        return self

    def add(self, way: str, num_bytes: int) -> None:
        setattr(self, f"messages_{way}", getattr(self, f"messages_{way}") + 1)
        setattr(self, f"bytes_{way}", getattr(self, f"bytes_{way}") + num_bytes)

    def __exit__(self, *error: object) -> None:
        VirtualWorld._send = self.before  # type: ignore[method-assign]


def timed(strategy: Sync | Async, workers: int, per_node: int) -> dict[str, Any]:
    """The same of a run in virtual time, with everything from its start to its end."""
    network = Cluster(ranks_per_node=per_node, gbit_per_s=GBIT_PER_S)
    load = Workload(num_parameters=NUMBERS, num_samples=10**9, step_samples=1, steps=TIMED_STEPS)
    roles, nodes = assign_workers(workers, network.nodes, 1, aggregates=strategy.aggregates)
    with Counts(roles.dealer, nodes) as counts:
        costs = Costs(memory_gb_per_s=MEMORY_GB_PER_S)
        found = time_run(
            strategy, load, workers, Constant(COMPUTE_S, 0.1), network, under=Circumstances(costs=costs)
        )
    names = ("messages_in", "messages_out", "bytes_in", "bytes_out", "link_in", "link_out")
    busiest = max(counts.link_in, counts.link_out) / (found["virtual_s"] * GBIT_PER_S * 1e9 / 8)
    assert busiest <= 1 + 1e-6, (
        f"{strategy}, {workers} workers: {busiest:.3f} of what the server's link can carry"
    )
    return {
        "strategy": str(strategy), "workers": workers, "nodes": len(set(nodes)), "pushes": found["accepted"],
        "pushes_per_s": found["accepted"] / found["virtual_s"], "link_share": busiest,
        **{name: getattr(counts, name) / found["accepted"] for name in names},
    }  # fmt: skip


def line_of(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["strategy"], str(found["workers"]), f"{found['messages']:.2f}", f"{found['bytes']:,.0f}",
        f"{1e3 * found['cpu_s']:.3f}",
    )  # fmt: skip


def virtual_line_of(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["strategy"], f"{found['workers']:,}", str(found["nodes"]), f"{found['messages_in']:.3f}",
        f"{found['messages_out']:.3f}", f"{found['bytes_in']:,.0f}", f"{found['bytes_out']:,.0f}",
        f"{found['pushes_per_s']:,.0f}", f"{found['link_share']:.0%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
