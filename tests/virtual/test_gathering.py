"""What has arrived for an update of a server is added in the order of ranks, as soon as that is known."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.roles import FaultTolerantServer
from mpitrain.roles.server import gathering as gathering_module
from mpitrain.roles.server.gathering import Gathering, num_waiting
from mpitrain.strategies import SoftSync, Sync
from mpitrain.virtual import Exponential
from tests.virtual.worlds import Shuffled, play

MOST = 12


class Pushed(NamedTuple):
    """A payload: whose, and which."""

    worker: int
    number: int
    num_bytes = 8


class Store:
    """Keeps the order in which it is handed gradients."""

    def __init__(self):
        self.added = []

    def hear_options(self, text):
        pass

    def add(self, worker, payload, weight, share):
        self.added.append(payload)


class Counted(set):
    """How often somebody goes through all of it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()

    def __sub__(self, other):
        self.passes += 1
        return super().__sub__(other)


def in_turn(events):
    """The gradients that can be added after these, by the definition, one update long."""
    added, pending, due, gone, without = [], {}, set(), set(), set()
    for what, worker, number in events:
        if what == "due":
            due |= {worker}
        elif what == "gone":
            gone |= {worker}
        elif what == "nothing":
            without |= {worker}
        else:
            pending[worker, number] = (worker, number)
        while pending:
            first = min(pending)
            arrived = {worker for worker, _ in added} | without
            if any(other < first[0] for other in due - gone - arrived):
                break
            added.append(pending.pop(first))
    return added


@given(
    st.sets(st.integers(0, MOST - 1)),
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "push", "nothing", "gone", "due"]), st.integers(0, MOST - 1)
        ),
        max_size=4 * MOST,
    ),
)
def test_a_gradient_is_added_when_nobody_before_it_is_missing(due, moves):
    store, now, version = Store(), set(due), 0
    gathering = Gathering(store)
    events = [("due", worker, 0) for worker in due]
    for number, (what, worker) in enumerate(moves):
        if what == "due" and any(event[:2] == ("gone", worker) for event in events):
            continue  # nobody comes back
        events.append((what, worker, number))
        if what == "push":
            gathering.take_gradient(worker, number, Pushed(worker, number), 1.0)
        elif what == "nothing":
            gathering.pass_over(worker)
        else:
            (now.add if what == "due" else now.discard)(worker)
            version += 1
        gathering.add_in_turn(now, version)
        assert store.added == in_turn(events), events
    left = sorted({(worker, number) for what, worker, number in events if what == "push"} - set(store.added))
    before = list(store.added)
    gathering.add_all()
    assert store.added == before + left and gathering.num_taken == len(store.added)
    gathering.clear()
    assert gathering.empty


def test_a_gradient_costs_no_look_at_all_workers():
    """They are gone through once for each set of workers, not at every push; two updates long."""
    store, due = Store(), Counted(range(1000))
    gathering = Gathering(store)
    for _ in range(2):
        for worker in reversed(range(1000)):
            gathering.take_gradient(worker, 0, Pushed(worker, 0), 1.0)
            gathering.add_in_turn(due, 0)
        assert store.added == [(worker, 0) for worker in range(1000)] and due.passes == 1
        gathering.clear()
        store.added.clear()


@pytest.mark.parametrize(
    ("push_bytes", "expected"), [(0, 256), (8, 256), (1 << 20, 128), (100 << 20, 2), (1 << 40, 2)]
)
def test_there_is_room_for_fewer_gradients_where_they_are_large(push_bytes, expected):
    assert num_waiting(push_bytes) == expected


@given(st.permutations(range(MOST)), st.integers(2, MOST + 1))
def test_whose_turn_is_next_is_always_let_in_and_no_more_wait_than_there_is_room_for(order, room):
    """Those who are not let in push as soon as they are: all are added in order, whoever came first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering_module, "MOST_WAITING", room)
        store, due = Store(), set(range(0, 2 * MOST, 2))  # ranks need not be neighbours
        gathering, at_senders = Gathering(store), []

        def has_room(worker):
            upto = gathering.upto(due, 0)
            assert upto is None or upto >= min(due - {worker for worker, _ in store.added})
            return upto is None or worker <= upto

        for index in order:
            at_senders.append(2 * index)
            while let_in := [worker for worker in at_senders if has_room(worker)]:
                at_senders.remove(let_in[0])
                gathering.take_gradient(let_in[0], 0, Pushed(let_in[0], 0), 1.0)
                gathering.add_in_turn(due, 0)
        assert store.added == [(worker, 0) for worker in sorted(due)]
        assert gathering.max_pending <= room


@pytest.mark.parametrize("strategy", [Sync(), Sync(servers=2), SoftSync(updates=7, blocking=True)])
def test_payloads_that_stay_with_their_senders_change_no_number(strategy, monkeypatch):
    """Seven workers in any order of arrival: the path is the same to the bit, and fewer wait."""
    run = {"compute": Exponential(), "network": Shuffled(3), "num_samples": 140, "epochs": 2}
    free = play(strategy, 7, **run)
    monkeypatch.setattr(gathering_module, "MOST_WAITING", 2)
    bound = play(strategy, 7, **run)
    assert [trace.store.path for trace in bound.traces] == [trace.store.path for trace in free.traces]
    assert free.counts["max_pending"] > 2 >= bound.counts["max_pending"]
    assert bound.counts["samples_accepted"] == free.counts["samples_accepted"] == 280


def test_a_payload_that_stays_costs_no_look_at_all_workers(monkeypatch):
    looks = []
    monkeypatch.setattr(gathering_module, "MOST_WAITING", 2)
    monkeypatch.setattr(
        FaultTolerantServer, "_look_for_silence", lambda server, now_s: iter(looks.append(now_s) or ())
    )
    assert play(Sync(), 7, num_samples=70, compute=Exponential()).counts["max_pending"] == 2 and not looks


@pytest.mark.parametrize("worker", [0, 3])
def test_who_keeps_its_payload_waits_and_is_no_reason_to_wait_for_the_silent(worker, monkeypatch):
    """One of seven stops, the first or one in the middle: all others have pushed, or keep what they push."""
    monkeypatch.setattr(gathering_module, "MOST_WAITING", 2)
    seen = play(
        Sync(),
        7,
        num_samples=70,
        epochs=2,
        freeze=(worker, 3, 10_000.0),
        least_silence_s=3.0,
        compute=Exponential(),
    )
    assert list(seen.trace.server.table.lost.values()) == ["silent"] and seen.ended_s < 1000
    assert seen.counts["samples_accepted"] == 140
