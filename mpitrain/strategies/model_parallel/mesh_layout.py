"""Which ranks hold which part of which replica: a pure function of (node of every rank, parts, who sits together).

Invariants: any rank can compute everybody's place without a message. What talks most sits on one node: a
group of such ranks is taken from one node wherever a node still has enough, and only what is left over is put
together across nodes. Rank 0 always holds part 0 of replica 0, so it logs and saves as in every other run.
"""

from __future__ import annotations

from typing import NamedTuple

from mpitrain.errors import UsageError


class Grid(NamedTuple):
    """`ranks[replica][part]`: every rank of the world exactly once."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def num_replicas(self) -> int:
        """Whole models."""
        return len(self.ranks)

    @property
    def num_parts(self) -> int:
        """Ranks that hold one model together."""
        return len(self.ranks[0])

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, part) of a rank."""
        for replica, row in enumerate(self.ranks):
            if rank in row:
                return replica, row.index(rank)
        raise AssertionError(f"rank {rank} is not in {self.ranks}")


def arrange(nodes: tuple[int, ...], num_parts: int, together: str) -> Grid:
    """Place the parts of all replicas.

    Args:
        nodes: node index of every rank; its length is the world's size, a multiple of `num_parts`.
        num_parts: ranks that hold one model.
        together: who talks most: "parts" puts the ranks of one model on one node, "replicas" those that hold the
            same part of different models.

    Raises:
        UsageError: the ranks cannot be dealt out evenly.
    """
    num_ranks = len(nodes)
    if num_ranks % num_parts:
        raise UsageError(
            f"{num_ranks} rank(s) cannot be divided into models of {num_parts}: start a multiple of {num_parts}"
        )
    by_parts = together == "parts"
    blocks = _blocks(nodes, num_parts if by_parts else num_ranks // num_parts)
    return Grid(tuple(blocks) if by_parts else tuple(zip(*blocks, strict=True)))


def _blocks(nodes: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Ranks in groups of `size`, as many of them as possible within one node; in the order of their lowest rank."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    blocks, left = [], []
    for ranks in by_node.values():
        whole = len(ranks) // size * size
        blocks += [tuple(ranks[at : at + size]) for at in range(0, whole, size)]
        left += ranks[whole:]
    blocks += [tuple(left[at : at + size]) for at in range(0, len(left), size)]
    return sorted(blocks)
