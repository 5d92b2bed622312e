"""Measure every pair of nodes, and every pair of ranks on one node, and say what stands out.

Invariants: collective over all ranks; rank 0 prints and decides. Pairs of nodes are measured by their first
ranks in rounds in which no node has two partners.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.doctor.judge import SLOW, Link, judge, rounds, sharing
from mpitrain.errors import EXIT_OK, EXIT_PREFLIGHT_FAILED
from mpitrain.system.atomic import write_whole
from mpitrain.system.launch_variables import node_name

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


def run_comm(runtime: Runtime, failing: Path | None, slow: float = SLOW, figures: Path | None = None) -> int:
    """`doctor --comm`: prints on rank 0; the exit code on every rank. `failing`: where slow nodes' names go; `figures`:
    where all that was measured goes, as JSON."""
    names = runtime.allgather(node_name())
    between, within = _between_nodes(runtime, names), _within_nodes(runtime)
    devices = runtime.allgather(_device(runtime.local_rank))
    if runtime.rank == 0 and figures is not None:
        _write(figures, runtime.nodes, names, between, within)
    code = _report(names, between, within, devices, failing, slow) if runtime.rank == 0 else 0
    return int(runtime.broadcast(code))


def _between_nodes(runtime: Runtime, names: list[str]) -> dict[tuple[str, str], Link]:
    from mpitrain.mpi.ping_pong import ping_pong

    first = [runtime.nodes.index(node) for node in range(runtime.num_nodes)]
    mine: list[Any] = []
    for pairs in rounds(runtime.num_nodes):
        runtime.barrier()
        for a, b in pairs:
            if runtime.rank in (first[a], first[b]):
                peer = first[b] if runtime.rank == first[a] else first[a]
                figures = ping_pong(runtime, peer)
                if runtime.rank < peer:
                    mine.append([names[first[a]], names[first[b]], *figures])
    measured = runtime.allgather(mine)
    return {(a, b): Link(latency_s, rate) for rows in measured for a, b, latency_s, rate in rows}


def _within_nodes(runtime: Runtime) -> list[list[Any]]:
    """[lower rank, higher rank, latency, rate] of all pairs on one node; nodes are measured side by side."""
    from mpitrain.mpi.ping_pong import ping_pong

    local = [rank for rank, node in enumerate(runtime.nodes) if node == runtime.nodes[runtime.rank]]
    most = max(runtime.nodes.count(node) for node in set(runtime.nodes))
    mine = []
    for pairs in rounds(most):
        runtime.barrier()
        for a, b in pairs:
            if b < len(local) and runtime.rank in (local[a], local[b]):
                peer = local[b] if runtime.rank == local[a] else local[a]
                figures = ping_pong(runtime, peer)
                if runtime.rank < peer:
                    mine.append([runtime.rank, peer, *figures])
    return [row for rows in runtime.allgather(mine) for row in rows]


def _write(
    path: Path,
    nodes: Sequence[int],
    names: list[str],
    between: dict[tuple[str, str], Link],
    within: list[list[Any]],
) -> None:
    """The figures of all pairs, for the network law `measured(FILE)`."""

    def rows(found: Iterable[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(("a", "b", "latency_s", "bytes_per_s"), row, strict=True)) for row in sorted(found)]

    content = {
        "nodes": list(nodes),
        "names": names,
        "between_nodes": rows([*pair, link.latency_s, link.rate] for pair, link in between.items()),
        "within_nodes": rows(within),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _device(local_rank: int) -> str | None:
    """The device a worker at this place of its node would take, by its UUID."""
    import torch

    if not torch.cuda.is_available():
        return None
    index = local_rank % torch.cuda.device_count()
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", f"{node_name()}/{index}"))


def _report(
    names: list[str],
    between: dict[tuple[str, str], Link],
    within: list[list[Any]],
    devices: list[str | None],
    failing: Path | None,
    slow: float,
) -> int:
    print(f"{'pair':<24} {'latency':>12} {'rate':>12}")
    for (a, b), link in sorted(between.items()):
        print(f"{f'{a} - {b}':<24} {link.latency_s * 1e6:>9.1f} us {link.rate / 1e6:>7.0f} MB/s")
    for a, b, latency_s, rate in sorted(within):
        print(f"{f'{names[a]}: ranks {a}, {b}':<24} {latency_s * 1e6:>9.1f} us {rate / 1e6:>7.0f} MB/s")
    verdict = judge(between, slow)
    for name in verdict.nodes:
        print(f"unfit: {name}: every link to it is slow")
    for a, b in verdict.links:
        print(f"unfit: the link {a} - {b} is slow, and both nodes have better ones")
    if len(set(names)) == 2:
        print("two nodes have one link: with nothing to compare it to; take three or more nodes")
    shared = sharing(devices)
    for device, ranks in shared:
        print(
            f"unfit: ranks {', '.join(map(str, ranks))} share device {device}: start one rank a GPU (--ntasks-per-node)"
        )
    if failing:
        failing.write_text("".join(f"{name}\n" for name in verdict.nodes), encoding="utf-8")
    bad = bool(verdict.nodes or verdict.links or shared)
    print("unfit" if bad else "fit", flush=True)
    return EXIT_PREFLIGHT_FAILED if bad else EXIT_OK
