"""Which rank plays which role: a pure function of (number of ranks, node of every rank, number of servers).

Law of this file: any rank can compute everybody's role without a message. On one node the servers are ranks
0..s-1. Over several nodes the strategy's placement picks them:

- "spread": round-robin over the nodes, from the last local rank of each, so that no node's link carries two
  servers while another carries none;
- "packed": the lowest ranks, so that the first nodes serve and the others only work;
- "beside": equally many on every node, its last local ranks, so that a share of every worker's traffic stays on
  its node and all links carry the same; refused where that does not come out even.

The lowest worker validates and owns the BatchNorm buffers; the lowest server deals the data.
"""

from __future__ import annotations

from typing import NamedTuple

from mpitrain.errors import UsageError

PLACEMENTS = ("spread", "packed", "beside")


class Roles(NamedTuple):
    """Ranks by role; `servers[i]` owns shard i."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def validator(self) -> int:
        """The rank that validates and saves the model: the lowest worker."""
        return self.workers[0]

    @property
    def dealer(self) -> int:
        """The rank that deals batches: the lowest server."""
        return self.servers[0]

    def of(self, rank: int) -> str:
        """`"server"` or `"worker"`."""
        return "server" if rank in self.servers else "worker"


def assign(nodes: tuple[int, ...], num_servers: int, placement: str = "spread") -> Roles:
    """Deal out the roles.

    Args:
        nodes: node index of every rank; its length is the world's size.
        num_servers: how many ranks serve.
        placement: one of `PLACEMENTS`.

    Raises:
        UsageError: no rank would be left to work, or "beside" does not come out even.
    """
    num_ranks = len(nodes)
    if num_servers >= num_ranks:
        raise UsageError(
            f"{num_servers} server(s) on {num_ranks} rank(s) leave no worker: start at least "
            f"{num_servers + 1} ranks or lower servers="
        )
    if len(set(nodes)) == 1 or placement == "packed":
        servers = tuple(range(num_servers))
    else:
        servers = (_beside if placement == "beside" else _spread)(nodes, num_servers)
    return Roles(servers, tuple(rank for rank in range(num_ranks) if rank not in servers))


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
