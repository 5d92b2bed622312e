"""What collectives cost, by the algorithm that carries them.

    p ranks, n bytes, alpha a message, beta a byte on the wire, gamma a byte that is added

    ring                 2 (p - 1) (alpha + n/p beta) + (p - 1) n/p gamma
    recursive doubling   lg p (alpha + n (beta + gamma))
    Rabenseifner         2 lg p alpha + 2 (p - 1) n/p beta + (p - 1) n/p gamma
    direct               2 alpha + 2 (p - 1) (post + n/p beta) + (p - 1) n/p gamma
    hierarchical         reduce-scatter in a node, direct between the nodes, all-gather in the node
    library              recursive doubling up to 2 KiB, Rabenseifner beyond; over nodes of several ranks a tree in each

A message longer than the eager limit takes 3 alpha: a header, the answer that the receiver is ready, and the data.

n/p is rounded up to whole items. Where p is no power of two, those above it first hand what they have to another rank,
and get the result from it at the end: 2 (alpha + n beta) + n gamma more. (Thakur, Rabenseifner, Gropp, "Optimization
of collective communication operations in MPICH", 2005; Chan et al., "Collective communication: theory, practice, and
experience", 2007. "Direct" is this package's own, `mpi/process_group/allreduce_algorithms.py`.)

Invariants: arithmetic only; no function here knows a clock. All ranks hear of all others in an all-reduce, a
reduce-scatter and an all-gather, so such a collective ends for everybody so long after the last rank has come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.virtual.message_law import LinkCost

SHORT_BYTES = 2048  # up to here a library doubles, beyond it halves and doubles (MPICH's rule)


class Cost(NamedTuple):
    """Of one collective: seconds from the arrival of the last rank, and bytes that the busiest rank sends."""

    seconds: float
    sent_bytes: int


def num_rounds(num_ranks: int) -> int:
    """ceil(lg p), exactly."""
    return (num_ranks - 1).bit_length()


def part_bytes(num_bytes: int, num_ranks: int, item_bytes: int = 1) -> int:
    """The longest of `num_ranks` parts of whole items."""
    return -(-(num_bytes // item_bytes) // num_ranks) * item_bytes


def ring_allreduce(num_ranks: int, num_bytes: int, link: LinkCost, item_bytes: int = 1) -> Cost:
    """p - 1 rounds in which everybody adds a part and hands it on, and as many in which sums go round. The longest
    part is under way in every round, so it sets the pace."""
    rounds, part = num_ranks - 1, part_bytes(num_bytes, num_ranks, item_bytes)
    seconds = 2 * rounds * (link.start_s(part) + part * link.beta_s) + rounds * part * link.gamma_s
    return Cost(seconds, 2 * rounds * part)


def recursive_doubling(num_ranks: int, num_bytes: int, link: LinkCost) -> Cost:
    """lg p rounds, in each of which pairs exchange everything."""
    rounds, folded = _powers(num_ranks)
    seconds = rounds * (link.start_s(num_bytes) + num_bytes * (link.beta_s + link.gamma_s))
    return _folded(Cost(seconds, rounds * num_bytes), folded, num_bytes, link)


def rabenseifner(num_ranks: int, num_bytes: int, link: LinkCost) -> Cost:
    """A reduce-scatter by halving distances, an all-gather by doubling them."""
    rounds, folded = _powers(num_ranks)
    in_core = 1 << rounds
    part = part_bytes(num_bytes, in_core)
    travels = (in_core - 1) * part
    started_s = 2 * sum(link.start_s(part << number) for number in range(rounds))
    seconds = started_s + 2 * travels * link.beta_s + travels * link.gamma_s
    return _folded(Cost(seconds, 2 * travels), folded, num_bytes, link)


def direct_allreduce(num_ranks: int, num_bytes: int, link: LinkCost, item_bytes: int = 1) -> Cost:
    """This package's own: everybody sends every part to its owner, who adds and sends the sum to everybody; messages
    follow one another, so latency counts once for each half."""
    partners, part = num_ranks - 1, part_bytes(num_bytes, num_ranks, item_bytes)
    if not partners:
        return Cost(0.0, 0)
    seconds = 2 * link.start_s(part) + 2 * partners * (link.post_s + part * link.beta_s)
    return Cost(seconds + partners * part * link.gamma_s, 2 * partners * part)


def library_allreduce(num_ranks: int, num_bytes: int, link: LinkCost) -> Cost:
    """What an MPI library takes: recursive doubling for short messages, Rabenseifner's algorithm for long ones."""
    algorithm = recursive_doubling if num_bytes <= SHORT_BYTES else rabenseifner
    return algorithm(num_ranks, num_bytes, link)


def smp_allreduce(node_sizes: Sequence[int], num_bytes: int, inside: LinkCost, between: LinkCost) -> Cost:
    """What an MPI library takes over nodes of several ranks: a reduction to one rank of each along a binomial tree,
    these among themselves, and a broadcast in each node (MPICH's default for all sizes)."""
    rounds = num_rounds(max(node_sizes))
    message_s = inside.start_s(num_bytes) + num_bytes * inside.beta_s
    over = library_allreduce(len(node_sizes), num_bytes, between)
    seconds = 2 * rounds * message_s + rounds * num_bytes * inside.gamma_s + over.seconds
    return Cost(seconds, rounds * num_bytes + over.sent_bytes)


def hierarchical_allreduce(
    node_sizes: Sequence[int], num_bytes: int, inside: LinkCost, between: LinkCost
) -> Cost:
    """Within each node a reduce-scatter, then every part between the nodes, then an all-gather within the node. All
    ranks of a node share its link to the others, so the whole travels over that once, however many ranks carry it.

    Args:
        node_sizes: ranks on each node; inside, between: links of a node and between nodes.
    """
    largest, columns = max(node_sizes), min(node_sizes)
    down, up = reduce_scatter(largest, num_bytes, inside), allgather(largest, num_bytes, inside)
    over = direct_allreduce(len(node_sizes), num_bytes, between)
    sent = -(-over.sent_bytes // columns) + down.sent_bytes + up.sent_bytes
    return Cost(down.seconds + over.seconds + up.seconds, sent)


def reduce_scatter(num_ranks: int, num_bytes: int, link: LinkCost, item_bytes: int = 1) -> Cost:
    """Each rank gets the sum of its part of `num_bytes`, round a ring."""
    rounds, part = num_ranks - 1, part_bytes(num_bytes, num_ranks, item_bytes)
    seconds = rounds * (link.start_s(part) + part * link.beta_s) + rounds * part * link.gamma_s
    return Cost(seconds, rounds * part)


def allgather(num_ranks: int, num_bytes: int, link: LinkCost, item_bytes: int = 1) -> Cost:
    """Each rank gets all parts of `num_bytes`, round a ring."""
    rounds, part = num_ranks - 1, part_bytes(num_bytes, num_ranks, item_bytes)
    return Cost(rounds * (link.start_s(part) + part * link.beta_s), rounds * part)


def allreduce_cost(
    algorithm: str, node_sizes: Sequence[int], num_bytes: int, inside: LinkCost, between: LinkCost
) -> Cost:
    """By the algorithm that a run has chosen: "library", "direct" or "hierarchical".

    Args:
        node_sizes: ranks on each node; inside, between: links of a node and between nodes.
    """
    num_ranks, num_nodes = sum(node_sizes), len(node_sizes)
    link = between if num_nodes > 1 else inside
    if algorithm == "hierarchical":
        return hierarchical_allreduce(node_sizes, num_bytes, inside, between)
    if algorithm == "direct":
        shared = max(node_sizes) if num_nodes > 1 else 1  # the ranks of a node send over one adapter
        return direct_allreduce(num_ranks, num_bytes, link._replace(beta_s=shared * link.beta_s))
    assert algorithm == "library", algorithm
    if 1 < num_nodes < num_ranks:
        return smp_allreduce(node_sizes, num_bytes, inside, between)
    return library_allreduce(num_ranks, num_bytes, link)


def _powers(num_ranks: int) -> tuple[int, int]:
    """(lg of the largest power of two that is not above `num_ranks`, how many ranks are left over)."""
    rounds = num_ranks.bit_length() - 1
    return rounds, num_ranks - (1 << rounds)


def _folded(core: Cost, num_left: int, num_bytes: int, link: LinkCost) -> Cost:
    """The cost where some ranks are left over by the power of two."""
    if not num_left:
        return core
    more_s = 2 * (link.start_s(num_bytes) + num_bytes * link.beta_s) + num_bytes * link.gamma_s
    return Cost(core.seconds + more_s, core.sent_bytes + num_bytes)
