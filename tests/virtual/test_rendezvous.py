"""Messages above the eager limit in virtual time, against closed forms: who waits for whom, in which order messages
come, and what becomes of them when a rank dies."""

from __future__ import annotations

import pytest

from mpitrain.effects import Break, Compute, Now, Recv, Send, Sleep
from mpitrain.messages import Lost, Update
from mpitrain.simulation.timing import Workload, time_run
from mpitrain.values import parse
from mpitrain.virtual import Cluster, Constant, VirtualWorld
from mpitrain.virtual.rendezvous import CONTROL_BYTES
from mpitrain.virtual.world import HEADER_BYTES

RATE = 1e9 / 8  # bytes per second
LATENCY_S = 1e-3
EAGER = 4096
LONG = 1_000_000
LAW = Cluster(gbit_per_s=1.0, latency_s=LATENCY_S, eager_bytes=EAGER)
# until data of a message that nothing else delays set out
HANDSHAKE_S = 2 * LATENCY_S + (HEADER_BYTES + CONTROL_BYTES) / RATE


class Payload:
    """Of so many bytes with the header; counts how often it is released."""

    def __init__(self, num_bytes):
        self.num_bytes, self.num_released = num_bytes - HEADER_BYTES, 0

    def statistics(self):
        return {}

    def release(self):
        self.num_released += 1


def send(to, number, num_bytes):
    return Send(to, Update(number, Payload(num_bytes)))


def data_s(num_bytes=LONG):
    return LATENCY_S + num_bytes / RATE


def compute(seconds):
    """Under the law `Constant(1, 0)`."""
    return Compute(lambda: None, "gradient", size=seconds, interruptible=False)


def world(**where):
    return VirtualWorld(Constant(1.0, 0.0), LAW, **where)


def listen(number, found):
    for _ in range(number):
        source, message = yield Recv()
        found.append(((yield Now()), source, message.step))


def test_a_long_message_takes_two_more_than_one_at_the_limit():
    found = []
    for num_bytes in (EAGER, EAGER + 1):

        def role(num_bytes=num_bytes):
            yield send(1, 0, num_bytes)

        world().run({0: role(), 1: listen(1, found)})
    (short_s, _, _), (long_s, _, _) = found
    assert short_s == pytest.approx(data_s(EAGER), rel=1e-12)
    assert long_s == pytest.approx(HANDSHAKE_S + data_s(EAGER + 1), rel=1e-12)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_computes_lets_long_messages_wait_unless_it_computes_on_another_thread(slow, apart):
    found = []

    def sender():
        yield send(1, 0, LONG)
        if slow == 0:
            yield compute(0.5)

    def receiver():
        if slow == 1:
            yield compute(0.5)
        yield from listen(1, found)

    world(drive_computing=(slow,) if apart else ()).run({0: sender(), 1: receiver()})
    ((at_s, _, _),) = found
    if apart:
        wanted_s = max(HANDSHAKE_S + data_s(), 0.5 * slow)
    elif slow == 1:  # the header waits
        wanted_s = 0.5 + LATENCY_S + CONTROL_BYTES / RATE + data_s()
    else:  # the answer waits
        wanted_s = 0.5 + data_s()
    assert at_s == pytest.approx(wanted_s, rel=1e-12)


def test_a_rank_that_sleeps_drives_its_messages():
    found = []

    def sender():
        yield send(1, 0, LONG)
        yield Sleep(0.5)

    world().run({0: sender(), 1: listen(1, found)})
    assert found[0][0] == pytest.approx(HANDSHAKE_S + data_s(), rel=1e-12)


@pytest.mark.parametrize("sharing", ["fcfs", "fair"])
def test_messages_of_a_pair_keep_their_order_whatever_their_lengths(sharing):
    found, sizes = [], [LONG, 200, 300, LONG, LONG, 200]

    def sender():
        for number, num_bytes in enumerate(sizes):
            yield send(1, number, num_bytes)

    law = Cluster(gbit_per_s=1.0, latency_s=LATENCY_S, eager_bytes=EAGER, sharing=sharing)
    VirtualWorld(Constant(1.0, 0.0), law).run({0: sender(), 1: listen(len(sizes), found)})
    assert [number for _, _, number in found] == list(range(len(sizes)))
    assert found[1][0] == found[2][0] == found[0][0]  # they were there, behind a header
    answer_s = LATENCY_S + CONTROL_BYTES / RATE
    assert found[3][0] - found[0][0] == pytest.approx(answer_s + data_s(), rel=1e-9)


def test_an_answer_waits_behind_the_data_that_its_sender_has_begun_to_send():
    """Rank 0 sends to rank 1, which sends to rank 2: its answer to rank 0 queues at its adapter."""
    found = []

    def first():
        yield Sleep(HANDSHAKE_S)  # by then the data of rank 1 have set out
        yield send(1, 0, LONG)

    def second():
        yield send(2, 0, LONG)
        yield from listen(1, found)

    world().run({0: first(), 1: second(), 2: listen(1, [])})
    begun_s = HANDSHAKE_S + LONG / RATE + CONTROL_BYTES / RATE + LATENCY_S
    assert found[0][0] == pytest.approx(begun_s + data_s(), rel=1e-9)


def test_a_rank_that_dies_before_its_data_set_out_is_reported_without_them():
    found, sent, behind = [], Payload(LONG), Payload(300)

    def dies():
        yield Send(1, Update(0, sent))
        yield Send(1, Update(1, behind))
        yield Break("kill", 0.25)
        yield compute(1.0)  # and lets the answer wait

    def survives():
        source, message = yield Recv()
        found.append((source, message))

    made = world(may_die=(0,))
    made.run({0: dies(), 1: survives()})
    assert [(source, type(message)) for source, message in found] == [(0, Lost)]
    assert (sent.num_released, behind.num_released) == (1, 1)


def test_a_rank_that_dies_while_its_data_are_under_way_is_reported_behind_them():
    found = []

    def dies():
        yield send(1, 7, LONG)
        yield Sleep(HANDSHAKE_S + 0.5 * LONG / RATE)
        yield Break("kill")

    def survives():
        for _ in range(2):
            found.append((yield Recv())[1])

    world(may_die=(0,)).run({0: dies(), 1: survives()})
    assert [type(message) for message in found] == [Update, Lost] and found[0].step == 7


def test_messages_to_a_rank_that_dies_are_given_back():
    waits, behind = Payload(LONG), Payload(300)

    def sender():
        yield Send(1, Update(0, waits))
        yield Send(1, Update(1, behind))
        yield Recv()  # of the death

    def dies():
        yield Break("kill", 0.25)
        yield compute(1.0)

    world(may_die=(1,)).run({0: sender(), 1: dies()})
    assert (waits.num_released, behind.num_released) == (1, 1)


def test_a_strategy_gives_the_same_counts_and_takes_longer_by_its_handshakes():
    """One worker and one server: every push and every reply waits for a handshake, and nothing else changes."""
    load = Workload(num_parameters=1_000_000, num_samples=320, step_samples=32)
    rule = parse("async()", "strategy")
    plain = Cluster(gbit_per_s=1.0, latency_s=LATENCY_S)
    one, other = (time_run(rule, load, 1, Constant(0.1, 0.0), law) for law in (plain, LAW))
    assert {key: one[key] for key in ("samples", "steps", "bytes_in", "bytes_out")} == {
        key: other[key] for key in ("samples", "steps", "bytes_in", "bytes_out")
    }
    num_long = 2 * other["steps"] + 1  # the first reply brings the parameters
    longer_s = other["virtual_s"] - one["virtual_s"]
    assert longer_s == pytest.approx(num_long * HANDSHAKE_S, rel=0.11)
