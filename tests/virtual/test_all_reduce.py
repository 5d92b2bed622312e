"""All-reduces of roles in virtual time: everybody gets the result, and the algorithm that a run would take is charged.

Seconds are equal to those of the formulas, not close.
"""

from typing import NamedTuple

import pytest

from mpitrain.effects import AllReduce, Begin, Break, Compute, Now, Recv, Send, Sleep
from mpitrain.errors import DeadlockError, LostRankError
from mpitrain.messages import Join, Update
from mpitrain.simulation.collective_costs import all_reduces
from mpitrain.virtual import Cluster, Constant, Ideal, Link, VirtualWorld
from mpitrain.virtual.all_reduces import AllReduces
from mpitrain.virtual.collectives import (
    LinkCost,
    direct_allreduce,
    hierarchical_allreduce,
    library_allreduce,
    recursive_doubling,
)
from mpitrain.virtual.link_costs import link_cost
from tests.virtual.test_virtual_collectives import Chunk


class Sum(NamedTuple):
    """Adds up `numbers`, one collective each."""

    numbers: tuple
    length: float = 4.0

    def rounds(self):
        found = []
        for number in self.numbers:
            found.append((yield number))
        return tuple(found)

    def num_bytes(self):
        return self.length


def add_up(brought):
    return [sum(brought)] * len(brought)


def worker(numbers, computes=0, length=4.0):
    for _ in range(computes):
        yield Compute(lambda: None, interruptible=False)
    reduction = Sum(numbers, length)
    yield Begin(reduction)
    found = yield AllReduce(reduction)
    return found, (yield Now())


def run(roles, network=Ideal(), ranks=None):  # noqa: B008 - frozen
    ranks = range(len(roles)) if ranks is None else ranks
    world = VirtualWorld(Constant(1.0, 0.0), network)
    return world.run(dict(enumerate(roles)), all_reduces(ranks, add_up, network, len(roles)))


def run_for(roles, took_s, ranks=None, **options):
    """In a world whose all-reduces take so long."""
    network = Cluster(gbit_per_s=8e-9, latency_s=1.0, **options)  # a byte a second
    together = AllReduces(range(len(roles)) if ranks is None else ranks, add_up, lambda num_bytes: took_s)
    return VirtualWorld(Constant(1.0, 0.0), network).run(dict(enumerate(roles)), together)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_every_result_when_the_last_has_come(size):
    ended = run([worker((rank, 10 * rank), computes=rank) for rank in range(size)])
    total = sum(range(size))
    assert ended == {rank: ((total, 10 * total), float(size - 1)) for rank in range(size)}


SLOW = LinkCost(1.0, 8.0, post_s=50e-6)  # Link(1e-9, 1.0): 8 seconds a byte


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [
        (4, 2000.0, recursive_doubling(4, 2000, SLOW)),
        (4, 10_000.0, library_allreduce(4, 10_000, SLOW)),  # shorter than what is measured for
        (4, 20_000.0, direct_allreduce(4, 20_000, SLOW)),
        (7, 100_001.0, direct_allreduce(7, 100_001, SLOW)),
        (1, 20_000.0, direct_allreduce(1, 20_000, SLOW)),
    ],
)
def test_it_takes_what_the_algorithm_takes_that_a_run_would_choose(size, length, expected):
    link = Link(gbit_per_s=1e-9, latency_s=1.0)
    ended = run([worker((1,), computes=rank, length=length) for rank in range(size)], link)
    assert {at_s for _, at_s in ended.values()} == {size - 1 + expected.seconds}


def test_nodes_of_several_ranks_send_each_sum_over_the_network_once():
    cluster = Cluster(ranks_per_node=2, gbit_per_s=0.1)
    inside, between = link_cost(cluster, 0, 1), link_cost(cluster, 0, 2, 2)
    ended = run([worker((1,), length=1e6) for _ in range(4)], cluster)
    cost = hierarchical_allreduce([2, 2], 10**6, inside, between)
    assert {at_s for _, at_s in ended.values()} == {cost.seconds}
    assert cost.seconds < direct_allreduce(4, 10**6, between).seconds


def test_a_setting_of_the_launch_chooses_in_virtual_time_too(monkeypatch):
    monkeypatch.setenv("MPITRAIN_ALLREDUCE", "library")
    ended = run([worker((1,), length=1e5) for _ in range(3)], Link(gbit_per_s=1e-9, latency_s=1.0))
    assert {at_s for _, at_s in ended.values()} == {library_allreduce(3, 10**5, SLOW).seconds}


def test_ranks_that_are_ahead_come_to_the_next_one_early_and_mix_up_nothing():
    def often(rank):
        answers = []
        for number in range(4):
            yield Compute(lambda: None, interruptible=False)
            answers.append((yield AllReduce(Sum((rank + number,)))))
        return answers

    ended = run([often(rank) for rank in range(3)], Link(gbit_per_s=1e-6, latency_s=0.1))
    assert all(answers == [(3 * number + 3,) for number in range(4)] for answers in ended.values())


@pytest.mark.parametrize("eager_bytes", [0, 100])
def test_what_comes_in_the_middle_waits_until_it_is_over_and_its_sender_does_not(eager_bytes):
    """Of 1000 bytes: they arrive although their receiver is in an all-reduce, which drives a rendezvous."""

    def receives():
        found = yield AllReduce(Sum((1,)))
        at_s = yield Now()
        source, message = yield Recv()
        return found, at_s, source, message.step, (yield Now())

    def sends():
        yield Send(0, Update(7, Chunk(1000)))
        yield Send(0, Update(8, Chunk(0)))

    roles = [receives(), worker((2,), computes=5), sends()]
    ended = run_for(roles, 4000.0, (0, 1), eager_bytes=eager_bytes)
    assert ended[0] == ((3,), 4005.0, 2, 7, 4005.0) and ended[1] == ((3,), 4005.0)


def test_a_rank_that_falls_silent_before_the_last_has_come_is_waited_for_for_ever():
    def falls_silent(after_s):
        yield Break("hang", after_s)
        yield from worker((1,))

    ended = run_for([falls_silent(50.0), worker((2,), computes=3)], 100.0)
    assert ended[1] == ((3,), 103.0)  # all had come
    with pytest.raises(DeadlockError, match="rank 1 waits since t=3.000 s for an all-reduce from rank 0"):
        run_for([falls_silent(2.0), worker((2,), computes=3)], 100.0)


@pytest.mark.parametrize("after_s", [2.0, 50.0])
def test_a_rank_that_dies_in_it_ends_the_run(after_s):
    def dies():
        yield Break("kill", after_s)
        yield from worker((1,))

    with pytest.raises(LostRankError, match="rank 0 died"):
        run_for([dies(), worker((2,), computes=3)], 100.0)


def test_a_deadlock_is_reported_with_who_waits_for_what_from_whom_since_when():
    def leaves(number):
        for _ in range(number):
            yield Compute(lambda: None, interruptible=False)

    def asks():
        yield Compute(lambda: None, interruptible=False)
        yield Send(0, Join(step=0))
        yield Recv(kind="Reply", sources=(0,))

    with pytest.raises(DeadlockError) as caught:
        run([leaves(3), asks()])
    assert str(caught.value) == (
        "deadlock at t=3.000 s, nobody will send what is waited for: rank 1 waits since t=1.000 s for Reply "
        "from rank 0 (last sent: Join to rank 0)"
    )
    with pytest.raises(DeadlockError) as caught:
        run([leaves(1), worker((1,)), worker((1,), computes=2), leaves(2)])
    assert (
        "rank 1 waits since t=0.000 s for an all-reduce from ranks 0, 3; rank 2 waits since t=2.000"
        in str(caught.value)
    )


def test_ranks_that_bring_different_things_are_an_error():
    with pytest.raises(AssertionError, match="different things"):
        run([worker((1, 2)), worker((1,))])


def test_who_is_not_among_them_goes_on():
    def outside():
        yield Sleep(1.0)
        return (yield Now())

    ended = run_for([worker((1,)), outside(), worker((2,), computes=2)], 10.0, (0, 2))
    assert ended == {0: ((3,), 12.0), 1: 1.0, 2: ((3,), 12.0)}
