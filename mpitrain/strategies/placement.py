"""Which rank plays which role: a pure function of (number of ranks, node of every rank, number of servers).

Invariants: any rank can compute everybody's role without a message. On one node the servers are ranks
0..s-1. Over several nodes the strategy's placement picks them:

- "spread": round-robin over the nodes, from the last local rank of each, so that no node's link carries two
  servers while another carries none;
- "packed": the lowest ranks, so that the first nodes serve and the others only work;
- "beside": equally many on every node, its last local ranks, so that a share of every worker's traffic stays on
  its node and all links carry the same; refused where that does not come out even.

In a heterogeneous job nothing is to choose: the ranks of the first component's nodes serve, the others work.
`allot` is the way back: which node each rank has to start on so that `assign` leaves every node its workers.

The lowest worker validates and owns the BatchNorm buffers; the lowest server deals the data.

With aggregators, each node that has at least two workers besides gives its highest rank that does not serve: all that
its workers and the servers send one another passes through it. A node of fewer ranks has none, and its workers send
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.errors import UsageError

PLACEMENTS = ("spread", "packed", "beside")
LEAST_AGGREGATED = 2  # workers of a node with an aggregator


class Roles(NamedTuple):
    """Ranks by role; `servers[i]` owns shard i, and the workers `members[i]` send through `aggregators[i]`."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    aggregators: tuple[int, ...] = ()
    members: tuple[tuple[int, ...], ...] = ()

    @property
    def validator(self) -> int:
        """The rank that validates and saves the model: the lowest worker."""
        return self.workers[0]

    @property
    def dealer(self) -> int:
        """The rank that deals batches: the lowest server."""
        return self.servers[0]

    def of(self, rank: int) -> str:
        """`"server"`, `"aggregator"` or `"worker"`."""
        if rank in self.servers:
            return "server"
        return "aggregator" if rank in self.aggregators else "worker"

    def behind(self, aggregator: int) -> tuple[int, ...]:
        """The workers that send through this rank."""
        return self.members[self.aggregators.index(aggregator)]

    def routes(self, rank: int) -> dict[int, int]:
        """The ranks that `rank`, a server or a worker, speaks to through an aggregator, each with that."""
        groups = zip(self.aggregators, self.members, strict=True)
        if rank in self.servers:
            return {worker: aggregator for aggregator, workers in groups for worker in workers}
        return {server: one for one, workers in groups if rank in workers for server in self.servers}


def assign(
    nodes: tuple[int, ...],
    num_servers: int,
    placement: str = "spread",
    num_server_nodes: int = 0,
    aggregates: bool = False,
) -> Roles:
    """Deal out the roles.

    Args:
        nodes: node index of every rank; its length is the world's size.
        num_servers: how many ranks serve.
        placement: one of `PLACEMENTS`.
        num_server_nodes: in a heterogeneous job, how many nodes the servers' component has: the first ones, whose
            ranks are the servers, whatever the placement. 0: the job is homogeneous.
        aggregates: whether nodes have aggregators.

    Raises:
        UsageError: no rank would be left to work, "beside" does not come out even, the servers' component has not
            as many ranks as there are servers, or no node has two workers to aggregate.
    """
    num_ranks = len(nodes)
    if num_servers >= num_ranks:
        raise UsageError(
            f"{num_servers} server(s) on {num_ranks} rank(s) leave no worker: start at least "
            f"{num_servers + 1} ranks or lower servers="
        )
    if num_server_nodes:
        servers = tuple(rank for rank, node in enumerate(nodes) if node < num_server_nodes)
        if len(servers) != num_servers:
            raise UsageError(
                f"the servers' component ({num_server_nodes} node(s)) has {len(servers)} rank(s) for {num_servers} "
                f"server(s): start exactly one rank a server there, or say servers={len(servers)}"
            )
    elif len(set(nodes)) == 1 or placement == "packed":
        servers = tuple(range(num_servers))
    else:
        servers = (_beside if placement == "beside" else _spread)(nodes, num_servers)
    serves = frozenset(servers)
    others = tuple(rank for rank in range(num_ranks) if rank not in serves)
    return _with_aggregators(nodes, servers, others) if aggregates else Roles(servers, others)


def _with_aggregators(nodes: tuple[int, ...], servers: tuple[int, ...], others: tuple[int, ...]) -> Roles:
    by_node: dict[int, list[int]] = {}
    for rank in others:
        by_node.setdefault(nodes[rank], []).append(rank)
    groups = [tuple(ranks) for ranks in by_node.values() if len(ranks) > LEAST_AGGREGATED]
    if not groups:
        raise UsageError(
            f'aggregate="node" takes one rank of each node that has {LEAST_AGGREGATED} workers or more, and no node '
            f"has {LEAST_AGGREGATED + 1} ranks besides servers: start more ranks on a node, or leave it out"
        )
    groups.sort(key=lambda ranks: ranks[-1])
    aggregators = tuple(ranks[-1] for ranks in groups)
    taken = frozenset(aggregators)
    workers = tuple(rank for rank in others if rank not in taken)
    return Roles(servers, workers, aggregators, tuple(ranks[:-1] for ranks in groups))


def assign_workers(
    num_workers: int,
    nodes_of: Callable[[int], tuple[int, ...]],
    num_servers: int,
    placement: str = "spread",
    aggregates: bool = False,
) -> tuple[Roles, tuple[int, ...]]:
    """The roles of as many ranks as leave `num_workers` workers, and the node of each; `nodes_of`: those of so many
    ranks.

    Raises:
        UsageError: as `assign`, or no number of ranks leaves that many.
    """
    num_ranks, tried = num_workers + num_servers, set[int]()
    while num_ranks not in tried:
        tried.add(num_ranks)
        nodes = nodes_of(num_ranks)
        try:
            roles = assign(nodes, num_servers, placement, aggregates=aggregates)
        except UsageError:
            if not aggregates or num_workers < LEAST_AGGREGATED or num_ranks > num_workers + num_servers:
                raise
            num_ranks += 1
            continue
        if len(roles.workers) == num_workers:
            return roles, nodes
        num_ranks += num_workers - len(roles.workers)
    raise UsageError(
        f"no number of ranks on these nodes leaves {num_workers} workers beside {num_servers} server(s) and the "
        "aggregators: take one worker more or fewer"
    )


def allot(
    num_nodes: int,
    workers_per_node: int,
    num_servers: int,
    placement: str = "spread",
    num_server_nodes: int = 0,
    aggregates: bool = False,
) -> tuple[int, ...]:
    """Node index of every rank, node by node, so that `assign` leaves each node `workers_per_node` workers.

    Args:
        num_nodes: all nodes, those of a servers' component included.
        workers_per_node: one for each GPU as a strategy; the servers' ranks, and the aggregators', come on top.
        num_server_nodes: as in `assign`; these nodes get the servers, evenly, and no workers.
        aggregates: as in `assign`.

    Raises:
        UsageError: as `assign`, or no node is left for the workers.
    """
    if num_server_nodes:
        if not 0 < num_server_nodes < num_nodes:
            raise UsageError(f"{num_server_nodes} of {num_nodes} node(s) for servers leave none for workers")
        if num_servers < num_server_nodes:
            raise UsageError(
                f"{num_servers} server(s) on {num_server_nodes} nodes of their own leave some without a rank: "
                f"say servers={num_server_nodes} or more, or ask for fewer nodes"
            )
        served = [
            num_servers * (node + 1) // num_server_nodes - num_servers * node // num_server_nodes
            for node in range(num_server_nodes)
        ]
        ranks = served + [workers_per_node] * (num_nodes - num_server_nodes)
    elif placement == "packed":
        ranks = [workers_per_node + num_servers] + [workers_per_node] * (
            num_nodes - 1
        )  # it takes the lowest ranks
    else:
        share, rest = divmod(num_servers, num_nodes)
        ranks = [workers_per_node + share + (node < rest) for node in range(num_nodes)]
    if aggregates and workers_per_node >= LEAST_AGGREGATED:
        ranks = [count + (node >= num_server_nodes) for node, count in enumerate(ranks)]
    nodes = tuple(node for node, count in enumerate(ranks) for _ in range(count))
    # refuses what the run would refuse
    assign(nodes, num_servers, placement, num_server_nodes, aggregates)
    return nodes


def _by_node(nodes: tuple[int, ...]) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def _beside(nodes: tuple[int, ...], num_servers: int) -> tuple[int, ...]:
    by_node = _by_node(nodes)
    share, rest = divmod(num_servers, len(by_node))
    if rest or any(len(ranks) < share for ranks in by_node.values()):
        raise UsageError(
            f'placement="beside" puts equally many servers on every node: {num_servers} on {len(by_node)} nodes of '
            f"{', '.join(str(len(ranks)) for ranks in by_node.values())} ranks do not come out even; use a multiple of "
            f'{len(by_node)} that leaves room, or placement="spread"'
        )
    return tuple(sorted(rank for ranks in by_node.values() for rank in ranks[len(ranks) - share :]))


def _spread(nodes: tuple[int, ...], num_servers: int) -> tuple[int, ...]:
    """Round-robin over the nodes, taking each node's highest free rank, and never a node's only rank while
    another has more.
    """
    by_node = _by_node(nodes)
    taken: list[int] = []
    while len(taken) < num_servers:
        richest = max(len(ranks) for ranks in by_node.values())
        for ranks in by_node.values():
            if len(ranks) == richest and len(taken) < num_servers:
                taken.append(ranks.pop())
    return tuple(sorted(taken))
