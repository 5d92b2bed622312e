"""Measure pairs of nodes, and pairs of ranks on one node, and say what stands out.

Invariants: collective over all ranks; rank 0 prints and decides. Pairs of nodes are measured by their first
ranks in rounds in which no node has two partners: all pairs of up to `ALL_PAIRS` nodes, and of more a sample whose
size per node does not grow. What looks slow is measured again, alone, before anybody is accused: on a busy machine one
bad round proves nothing.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.doctor import mpi_settings
from mpitrain.doctor.judge import ALL_PAIRS, SAMPLED_ROUNDS, SLOW, Link, disjoint, judge, rounds, sharing
from mpitrain.doctor.judge import Verdict as Links
from mpitrain.doctor.listening import listening
from mpitrain.errors import EXIT_OK, EXIT_PREFLIGHT_FAILED
from mpitrain.mpi.engine import doorbell
from mpitrain.system.files.atomic import write_whole
from mpitrain.system.launched.launch_variables import node_name, usable_cores
from mpitrain.system.saying import say

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

AGAIN = 2  # times that a suspicion is measured again

Pair = tuple[int, int]


def run_comm(runtime: Runtime, failing: Path | None, slow: float = SLOW, figures: Path | None = None) -> int:
    """`doctor --comm`: prints on rank 0; the exit code on every rank. `failing`: where slow nodes' names go; `figures`:
    where all that was measured goes, as JSON."""
    names = runtime.gather(node_name())
    between, verdict = _between_nodes(runtime, slow)
    within = _within_nodes(runtime)
    more = _together(runtime) if figures is not None else {}
    devices = runtime.gather(_device(runtime.local_rank))
    open_ports = runtime.gather(listening())
    code = 0
    if runtime.rank == 0 and names is not None and devices is not None:
        by_node = {node: names[rank] for rank, node in reversed(list(enumerate(runtime.nodes)))}
        if figures is not None:
            _write(figures, runtime.nodes, names, by_node, between, within, more)
        links = {(by_node[a], by_node[b]): link for (a, b), link in between.items()}
        found = Links(
            [by_node[int(node)] for node in verdict.nodes],
            [(by_node[int(a)], by_node[int(b)]) for a, b in verdict.links],
        )
        code = _report(names, links, found, within, devices, failing)
        assert open_ports is not None
        for rank, places in enumerate(open_ports):
            told = ", ".join(places) or "nowhere"
            say(f"{names[rank]}: rank {rank} listens: {told}")
        num_local = runtime.nodes.count(runtime.nodes[0])
        for line in mpi_settings.lines(
            runtime.library, os.environ, mpi_settings.yields_to_others(num_local, usable_cores())
        ):
            say(line)
        say(mpi_settings.waiting(doorbell.why_not("none"), doorbell.why_not(runtime.fault_tolerance)))
    return int(runtime.broadcast(code))


def _between_nodes(runtime: Runtime, slow: float) -> tuple[dict[Pair, Link], Links]:
    """The links and the verdict on them, by numbers of nodes, on rank 0; nothing elsewhere."""
    first: dict[int, int] = {}
    for rank, node in enumerate(runtime.nodes):
        first.setdefault(node, rank)
    links: dict[Pair, Link] = {}
    for pairs in rounds(runtime.num_nodes, SAMPLED_ROUNDS):
        links |= _measure(runtime, pairs, first)
    links = _gathered(runtime, links)
    for _ in range(AGAIN):
        suspects = runtime.broadcast(_suspects(links, slow) if runtime.rank == 0 else None)
        if not suspects:
            break
        again: dict[Pair, Link] = {}
        for pairs in disjoint([(a, b) for a, b in suspects]):
            again |= _measure(runtime, pairs, first)
        for pair, link in _gathered(runtime, again).items():
            before = links[pair]
            links[pair] = Link(min(before.latency_s, link.latency_s), max(before.rate, link.rate))
    return links, judge(_by_text(links), slow)


def _by_text(links: dict[Pair, Link]) -> dict[tuple[str, str], Link]:
    return {(str(a), str(b)): link for (a, b), link in links.items()}


def _suspects(links: dict[Pair, Link], slow: float) -> list[Pair]:
    """The links that a verdict on what was measured so far rests on."""
    verdict = judge(_by_text(links), slow)
    nodes = {int(node) for node in verdict.nodes}
    blamed = {(int(a), int(b)) for a, b in verdict.links}
    return [pair for pair in links if pair in blamed or nodes.intersection(pair)]


def _measure(runtime: Runtime, pairs: list[Pair], first: dict[int, int]) -> dict[Pair, Link]:
    """One round between the first ranks of nodes; what this rank has seen, if it is the lower one of a pair."""
    from mpitrain.mpi.ping_pong import ping_pong

    runtime.barrier()
    for a, b in pairs:
        if runtime.rank in (first[a], first[b]):
            peer = first[b] if runtime.rank == first[a] else first[a]
            link = Link(*ping_pong(runtime, peer))
            return {(a, b): link} if runtime.rank < peer else {}
    return {}


def _gathered(runtime: Runtime, links: dict[Pair, Link]) -> dict[Pair, Link]:
    """All ranks' links on rank 0; none elsewhere."""
    rows = runtime.gather([[*pair, *link] for pair, link in links.items()]) or []
    return {(a, b): Link(latency_s, rate) for row in rows for a, b, latency_s, rate in row}


def _within_nodes(runtime: Runtime) -> list[list[Any]]:
    """[lower rank, higher rank, latency, rate] of pairs on one node, on rank 0; nodes are measured side by side."""
    from mpitrain.mpi.ping_pong import ping_pong

    local = [rank for rank, node in enumerate(runtime.nodes) if node == runtime.nodes[runtime.rank]]
    most = max(runtime.nodes.count(node) for node in set(runtime.nodes))
    mine = []
    for pairs in rounds(most, SAMPLED_ROUNDS):
        runtime.barrier()
        for a, b in pairs:
            if b < len(local) and runtime.rank in (local[a], local[b]):
                peer = local[b] if runtime.rank == local[a] else local[a]
                figures = ping_pong(runtime, peer)
                if runtime.rank < peer:
                    mine.append([runtime.rank, peer, *figures])
    return [row for rows in runtime.gather(mine) or [] for row in rows]


def _together(runtime: Runtime) -> dict[str, Any]:
    """On rank 0: the eager limit of a pair, and what each node's first rank gets while those of all nodes send at once;
    where there is one node, of its ranks."""
    from mpitrain.mpi.ping_pong import eager_bytes, ring

    first = [runtime.nodes.index(node) for node in sorted(set(runtime.nodes))]
    ranks = first if len(first) > 1 else list(range(runtime.size))
    if len(ranks) < 2:
        return {}
    a, b = sorted(ranks[:2])
    limit, busy = 0, None
    runtime.barrier()
    if runtime.rank in (a, b):
        limit = eager_bytes(runtime, b if runtime.rank == a else a)
    runtime.barrier()
    if runtime.rank in ranks:
        busy = ring(runtime, ranks)
    rows = [row for row in runtime.gather(busy) or [] if row is not None]
    limits = runtime.gather(limit) or []
    if not rows:
        return {}
    found: dict[str, Any] = {"eager_bytes": max(limits)}
    if len(first) > 1:
        latency_s, rate = max(row[0] for row in rows), min(row[1] for row in rows)
        found["all_nodes_at_once"] = {"latency_s": latency_s, "bytes_per_s": rate}
    return found


def _write(
    path: Path,
    nodes: Sequence[int],
    names: list[str],
    by_node: dict[int, str],
    between: dict[Pair, Link],
    within: list[list[Any]],
    more: dict[str, Any],
) -> None:
    """The figures of all pairs, and those of `_together`, for the network law `measured(FILE)`."""

    def rows(found: Iterable[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(("a", "b", "latency_s", "bytes_per_s"), row, strict=True)) for row in sorted(found)]

    content = {
        "nodes": list(nodes),
        "names": names,
        "between_nodes": rows(
            [by_node[a], by_node[b], link.latency_s, link.rate] for (a, b), link in between.items()
        ),
        "within_nodes": rows(within),
        **more,
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _device(local_rank: int) -> str | None:
    """The device a worker at this place of its node would take, by its UUID."""
    from mpitrain.devices import accelerator

    if (kind := accelerator.kind()) is None:
        return None
    device = accelerator.of_rank(kind, local_rank)
    return accelerator.uuid_of(device) or f"{node_name()}/{device.index}"


def _report(
    names: list[str],
    links: dict[tuple[str, str], Link],
    verdict: Links,
    within: list[list[Any]],
    devices: list[str | None],
    failing: Path | None,
) -> int:
    for line in _overview(names, links, within):
        say(line)
    for name in verdict.nodes:
        best = max((link for pair, link in links.items() if name in pair), key=lambda link: link.rate)
        say(f"unfit: {name}: every link to it is slow, the best one {_figures(best)}")
    for a, b in verdict.links:
        say(f"unfit: the link {a} - {b} is slow, {_figures(links[a, b])}, and both nodes have better ones")
    if len(set(names)) == 2:
        say("two nodes have one link: with nothing to compare it to; take three or more nodes")
    shared = sharing(devices)
    for device, ranks in shared:
        say(
            f"unfit: ranks {', '.join(map(str, ranks))} share device {device}: "
            "start one rank a GPU (--ntasks-per-node)"
        )
    if failing:
        failing.write_text("".join(f"{name}\n" for name in verdict.nodes), encoding="utf-8")
    bad = bool(verdict.nodes or verdict.links or shared)
    say("unfit" if bad else "fit")
    return EXIT_PREFLIGHT_FAILED if bad else EXIT_OK


def _overview(names: list[str], links: dict[tuple[str, str], Link], within: list[list[Any]]) -> Iterator[str]:
    """What is usual, in a line for the links between nodes and one for those within them."""
    num_nodes = len({name for pair in links for name in pair})
    sample = f", {SAMPLED_ROUNDS} partners each" if num_nodes > ALL_PAIRS else ""
    inside = [Link(latency_s, rate) for _, _, latency_s, rate in within]
    for found, where in (
        (list(links.values()), f"between {num_nodes} nodes{sample}"),
        (inside, f"within {len(set(names))} node(s)"),
    ):
        if found:
            rates = [link.rate for link in found]
            median = Link(statistics.median(link.latency_s for link in found), statistics.median(rates))
            extent = f"{min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s"
            yield f"{len(found)} link(s) {where}: median {_figures(median)} ({extent})"


def _figures(link: Link) -> str:
    return f"{link.latency_s * 1e6:.1f} us and {link.rate / 1e6:.0f} MB/s"
