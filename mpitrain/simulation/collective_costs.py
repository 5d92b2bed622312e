"""What the collectives of a run cost, each by the algorithm that would carry it.

Invariants: it asks the function that a run asks which algorithm carries an allreduce. This file does not know torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.mpi.allreduce_plan import AUTO, Transport, pinned
from mpitrain.mpi.process_group.algorithm_choice import adds_up, choose, index_bytes
from mpitrain.virtual.all_reduces import AllReduces, Reduce
from mpitrain.virtual.collectives import Cost, allgather, allreduce_cost, reduce_scatter
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.message_law import LinkCost
from mpitrain.virtual.network import NetworkLaw


class Collectives:
    """Costs of the collectives of a run.

    Args:
        network: between ranks; nodes: of every rank.
    """

    def __init__(self, network: NetworkLaw, nodes: Sequence[int]):
        self.network, self.nodes = network, nodes
        self.used: dict[int, str] = {}  # bytes of an allreduce: its algorithm
        self._layouts: dict[tuple[int, ...], tuple[list[list[int]], LinkCost, LinkCost]] = {}

    def allreduce(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of so many bytes over these ranks, by the algorithm that a run would take."""
        if len(ranks) == 1:
            return Cost(0.0, 0)
        layout, inside, between = self._layout(ranks)
        slowest = between if len(layout) > 1 else inside
        transport = Transport.modelled(slowest.alpha_s, slowest.beta_s)
        self.used[num_bytes] = algorithm = choose(num_bytes, layout, transport, pinned() or AUTO)
        return allreduce_cost(algorithm, [len(node) for node in layout], num_bytes, inside, between)

    def allgather(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of parts that are so many bytes together."""
        return allgather(len(ranks), num_bytes, self._slowest(ranks))

    def sparse_allreduce(
        self, num_entries: int, num_different: int, num_rows: int, row_bytes: int, ranks: Sequence[int]
    ) -> Cost:
        """Of rows of a table of `num_rows`, so many of all ranks together: how many each has, which they are, and their
        values."""
        counts = self.allreduce(8 * len(ranks), ranks)
        indices = self.allgather(num_entries * index_bytes((num_rows,)), ranks)
        if adds_up(num_entries, num_different):
            values = self.allreduce(num_different * row_bytes, ranks)
        else:
            values = self.allgather(num_entries * row_bytes, ranks)
        parts = (counts, indices, values)
        return Cost(sum(part.seconds for part in parts), sum(part.sent_bytes for part in parts))

    def reduce_scatter(self, num_bytes: int, ranks: Sequence[int]) -> Cost:
        """Of so many bytes on every rank."""
        return reduce_scatter(len(ranks), num_bytes, self._slowest(ranks))

    def message_s(self, num_bytes: int, source: int, to: int) -> float:
        """From one rank to another."""
        cost = link_cost(self.network, source, to)
        return cost.alpha_s + num_bytes * cost.beta_s

    def _slowest(self, ranks: Sequence[int]) -> LinkCost:
        layout, inside, between = self._layout(ranks)
        return between if len(layout) > 1 else inside

    def _layout(self, ranks: Sequence[int]) -> tuple[list[list[int]], LinkCost, LinkCost]:
        """(the ranks by node, the link within a node, the link between nodes)."""
        key = tuple(ranks)
        if key not in self._layouts:
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(self.nodes[rank], []).append(rank)
            layout = list(by_node.values())
            largest = max(layout, key=len)
            inside = link_cost(self.network, *largest[:2]) if len(largest) > 1 else LinkCost()
            between = LinkCost()
            if len(layout) > 1:
                between = link_cost(self.network, layout[0][0], layout[1][0], len(layout))
            self._layouts[key] = layout, inside, between
        return self._layouts[key]


def all_reduces(ranks: Sequence[int], reduce: Reduce, network: NetworkLaw, num_ranks: int) -> AllReduces:
    """Those of roles: `reduce` carries them out, and they take what the algorithm takes that a run would choose.

    Args:
        ranks: that all-reduce; num_ranks: of the world.
    """
    costs = Collectives(network, network.nodes(num_ranks) or range(num_ranks))
    return AllReduces(ranks, reduce, lambda num_bytes: costs.allreduce(num_bytes, ranks).seconds)
