"""Collectives by their formulas, and the same message by message in virtual time: seconds are equal, not close."""

import itertools
from typing import NamedTuple

import pytest

from mpitrain.effects import Now, Recv, Send, Sleep
from mpitrain.messages import Update
from mpitrain.virtual import Constant, Link, VirtualWorld
from mpitrain.virtual.collectives import (
    Cost,
    LinkCost,
    allgather,
    direct_allreduce,
    hierarchical_allreduce,
    library_allreduce,
    rabenseifner,
    recursive_doubling,
    reduce_scatter,
    ring_allreduce,
    smp_allreduce,
)
from mpitrain.virtual.world import HEADER_BYTES

BYTE_A_SECOND = Link(gbit_per_s=8e-9, latency_s=3.0)
# a message of the virtual world has a header
MESSAGE = LinkCost(alpha_s=3.0 + HEADER_BYTES, beta_s=1.0)
PLAIN = LinkCost(alpha_s=16.0, beta_s=0.5, gamma_s=0.25)


class Chunk(NamedTuple):
    """A part of what is reduced."""

    num_bytes: int

    def statistics(self):
        return {}

    def release(self):
        """Nothing is held."""


def take(waiting, source):
    """The next message of a rank; those of others are kept for later."""
    while not waiting.get(source):
        sender, message = yield Recv()
        waiting.setdefault(sender, []).append(message)
    return waiting[source].pop(0)


def exchange(rank, rounds, late_s=0.0, paced=False):
    """A rank of an algorithm whose rounds are (to or None, from or None, bytes); `paced`: one message at a time."""
    waiting = {}
    if late_s:
        yield Sleep(late_s)
    for to, source, num_bytes in rounds:
        if to is not None:
            yield Send(to, Update(0, Chunk(num_bytes)))
            if paced:
                yield Sleep(num_bytes + HEADER_BYTES, interruptible=False)
        if source is not None:
            yield from take(waiting, source)
    return (yield Now())


def seconds(programs, late=None, paced=False):
    roles = {
        rank: exchange(rank, rounds, (late or {}).get(rank, 0.0), paced)
        for rank, rounds in enumerate(programs)
    }
    return VirtualWorld(Constant(1.0, 0.0), BYTE_A_SECOND).run(roles)


def in_a_ring(num_ranks, num_bytes, late=None):
    part, rounds = -(-num_bytes // num_ranks), 2 * (num_ranks - 1)
    programs = [
        [((rank + 1) % num_ranks, (rank - 1) % num_ranks, part)] * rounds for rank in range(num_ranks)
    ]
    return seconds(programs, late)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("num_bytes", [0, 1, 64, 1000, 1009])
def test_messages_round_a_ring_take_what_the_formula_says(num_ranks, num_bytes):
    cost = ring_allreduce(num_ranks, num_bytes, MESSAGE)
    assert set(in_a_ring(num_ranks, num_bytes).values()) == {cost.seconds}
    late = {rank: float(rank * rank) for rank in range(num_ranks)}
    assert max(in_a_ring(num_ranks, num_bytes, late).values()) == max(late.values()) + cost.seconds


@pytest.mark.parametrize("power", [1, 2, 3])
def test_recursive_doubling_and_halving_take_what_their_formulas_say(power):
    num_ranks, num_bytes = 1 << power, 960
    doubling = [
        [(rank ^ 1 << bit, rank ^ 1 << bit, num_bytes) for bit in range(power)] for rank in range(num_ranks)
    ]
    assert set(seconds(doubling).values()) == {recursive_doubling(num_ranks, num_bytes, MESSAGE).seconds}
    cost = recursive_doubling(num_ranks, num_bytes, MESSAGE)
    assert max(seconds(doubling, {num_ranks - 1: 256.0}).values()) == 256.0 + cost.seconds
    halving = [
        [(rank ^ 1 << bit, rank ^ 1 << bit, num_bytes >> (power - bit)) for bit in reversed(range(power))]
        for rank in range(num_ranks)
    ]
    both = [rows + rows[::-1] for rows in halving]
    assert set(seconds(both).values()) == {rabenseifner(num_ranks, num_bytes, MESSAGE).seconds}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_our_own_algorithm_waits_for_latency_once_in_each_half(num_ranks):
    """What a header takes on the link stands for what posting a message takes."""
    link = LinkCost(alpha_s=3.0, beta_s=1.0, post_s=HEADER_BYTES)
    part, steps = 100, range(1, num_ranks)
    programs = []
    for rank in range(num_ranks):
        half = [((rank + step) % num_ranks, None, part) for step in steps]
        half += [(None, (rank - step) % num_ranks, 0) for step in steps]
        programs.append(half * 2)
    cost = direct_allreduce(num_ranks, part * num_ranks, link)
    assert set(seconds(programs, paced=True).values()) == {cost.seconds}


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes"), list(itertools.product([1, 2, 3, 4, 5, 8, 9], [0, 1, 1024, 4099]))
)
def test_the_formulas_are_those_of_the_books(num_ranks, num_bytes):
    alpha, beta, gamma = PLAIN.alpha_s, PLAIN.beta_s, PLAIN.gamma_s
    part = -(-num_bytes // num_ranks)
    others = num_ranks - 1
    ring = ring_allreduce(num_ranks, num_bytes, PLAIN)
    assert ring == Cost(
        2 * others * alpha + 2 * others * part * beta + others * part * gamma, 2 * others * part
    )
    if num_bytes % num_ranks == 0:
        assert ring.sent_bytes * num_ranks == 2 * others * num_bytes  # 2 (p - 1) / p n
    scattered, gathered = (function(num_ranks, num_bytes, PLAIN) for function in (reduce_scatter, allgather))
    assert scattered.seconds + gathered.seconds == ring.seconds
    assert scattered.sent_bytes + gathered.sent_bytes == ring.sent_bytes
    posted = PLAIN._replace(post_s=0.125)
    direct = direct_allreduce(num_ranks, num_bytes, posted)
    expected = 2 * alpha + 2 * others * (0.125 + part * beta) + others * part * gamma
    assert direct == (Cost(expected, 2 * others * part) if others else Cost(0.0, 0))


def test_ranks_beyond_a_power_of_two_fold_into_it():
    four, five = (recursive_doubling(number, 100, PLAIN).seconds for number in (4, 5))
    assert five - four == 2 * (16.0 + 50.0) + 25.0
    four, five = (rabenseifner(number, 100, PLAIN).seconds for number in (4, 5))
    assert five - four == 2 * (16.0 + 50.0) + 25.0


def test_a_library_doubles_short_messages_and_halves_long_ones():
    assert library_allreduce(8, 2048, PLAIN) == recursive_doubling(8, 2048, PLAIN)
    assert library_allreduce(8, 2049, PLAIN) == rabenseifner(8, 2049, PLAIN)
    crossing = 2 * PLAIN.alpha_s / (PLAIN.beta_s * (2 - 1.5) + PLAIN.gamma_s * (2 - 0.75))  # of four ranks
    short, long = int(crossing) // 4 * 4, int(crossing) // 4 * 4 + 4
    assert recursive_doubling(4, short, PLAIN).seconds <= rabenseifner(4, short, PLAIN).seconds
    assert recursive_doubling(4, long, PLAIN).seconds > rabenseifner(4, long, PLAIN).seconds


def test_a_library_reduces_in_each_node_before_the_nodes_talk():
    inside, between = LinkCost(1.0, 0.125, 0.0625), LinkCost(16.0, 1.0, 0.25)
    across = library_allreduce(4, 4096, between)
    cost = smp_allreduce([3, 3, 2, 3], 4096, inside, between)
    assert cost.seconds == 2 * 2 * (1.0 + 512.0) + 2 * 256.0 + across.seconds
    assert smp_allreduce([1] * 4, 4096, inside, between) == across


def test_a_hierarchy_is_a_scatter_in_the_node_the_nodes_among_themselves_and_a_gather():
    inside, between = LinkCost(1.0, 0.125, 0.0625), LinkCost(16.0, 1.0, 0.25)
    cost = hierarchical_allreduce([4, 4, 4], 1200, inside, between)
    scatter = 3 * (1.0 + 300 * 0.125) + 3 * 300 * 0.0625
    across = 2 * 16.0 + 2 * 2 * 400 * 1.0 + 2 * 400 * 0.25
    assert cost.seconds == scatter + across + 3 * (1.0 + 300 * 0.125)
    assert hierarchical_allreduce([1, 1], 1200, inside, between) == direct_allreduce(2, 1200, between)
    alone = hierarchical_allreduce([4], 1200, inside, between)
    assert alone.seconds == reduce_scatter(4, 1200, inside).seconds + allgather(4, 1200, inside).seconds


@pytest.mark.parametrize(
    "collective, num_messages",
    [(ring_allreduce, 14), (recursive_doubling, 3), (rabenseifner, 6), (direct_allreduce, 2), (allgather, 7)],
)
def test_messages_above_the_eager_limit_take_two_latencies_more(collective, num_messages):
    """Of 8 ranks; all messages of 800 bytes are longer than 99, those of a part or two are not longer than 800."""
    for limit, longer in ((0, 0), (99, num_messages), (10**6, 0)):
        cost = collective(8, 800, PLAIN._replace(eager_bytes=limit))
        assert cost.seconds == collective(8, 800, PLAIN).seconds + 2 * longer * PLAIN.alpha_s
    assert rabenseifner(8, 800, PLAIN._replace(eager_bytes=100)).seconds == pytest.approx(
        rabenseifner(8, 800, PLAIN).seconds
        + 2 * 2 * 2 * PLAIN.alpha_s  # those of 200 and 400 bytes, not of 100
    )
