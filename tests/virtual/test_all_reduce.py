"""All-reduces of roles in virtual time: everybody gets the result, and a ring is charged for it."""

from typing import NamedTuple

import pytest

from mpitrain.effects import AllReduce, Compute, Now, Recv, Send
from mpitrain.errors import DeadlockError
from mpitrain.messages import Join
from mpitrain.virtual import Constant, Ideal, Link, VirtualWorld


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
    found = yield AllReduce(Sum(numbers, length))
    return found, (yield Now())


def run(roles, network=Ideal()):  # noqa: B008 - frozen
    return VirtualWorld(Constant(1.0, 0.0), network).run(dict(enumerate(roles)), add_up)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_every_result_when_the_last_has_come(size):
    ended = run([worker((rank, 10 * rank), computes=rank) for rank in range(size)])
    total = sum(range(size))
    assert ended == {rank: ((total, 10 * total), float(size - 1)) for rank in range(size)}


def test_it_takes_as_long_as_its_bytes_take_round_a_ring():
    link = Link(gbit_per_s=8e-9, latency_s=1.0)  # a byte a second
    ended = run([worker((1,), length=400.0) for _ in range(4)], link)
    assert {at_s for _, at_s in ended.values()} == {6 * (1.0 + 160 + 100)}


def test_ranks_that_are_ahead_come_to_the_next_one_early_and_mix_up_nothing():
    def often(rank):
        answers = []
        for number in range(4):
            yield Compute(lambda: None, interruptible=False)
            answers.append((yield AllReduce(Sum((rank + number,)))))
        return answers

    ended = run([often(rank) for rank in range(3)], Link(gbit_per_s=1e-6, latency_s=0.1))
    assert all(answers == [(3 * number + 3,) for number in range(4)] for answers in ended.values())


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
    with pytest.raises(
        DeadlockError, match="rank 1 waits since t=0.000 s for round 0 of an allreduce from rank 0 "
    ):
        run([leaves(1), worker((1,)), worker((1,))])


def test_ranks_that_bring_different_things_are_an_error():
    with pytest.raises(AssertionError, match="different things"):
        run([worker((1, 2)), worker((1,))])
