"""Payloads of pushes are let in when there is room, and whoever is stopped holds up nobody else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.mpi import pushes_at_senders
from mpitrain.mpi.pushes_at_senders import PATIENCE_S, PushesAtSenders

NUM_RANKS = 6


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test lets pass."""
    now = [100.0]
    monkeypatch.setattr(pushes_at_senders.time, "monotonic", lambda: now[0])
    return now


@given(
    room=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 30), min_size=NUM_RANKS, max_size=NUM_RANKS),
    order=st.permutations(range(NUM_RANKS)),
    moves=st.lists(st.sampled_from(["arrive", "take", "leave"]), max_size=60),
)
def test_no_more_is_here_than_there_is_room_for_and_everything_comes_at_last(room, sizes, order, moves):
    """All ranks announce at once; what the role has taken it answers with as many bytes."""
    pushes, under_way, here, leaving, came = PushesAtSenders(room), [], [], [], []

    def look():
        while (rank := pushes.take()) is not None:
            under_way.append(rank)
        counted = [sizes[rank] for rank in (*under_way, *here, *leaving)]
        alone = len(under_way) + len(here) <= 1 and sum(sizes[rank] for rank in leaving) <= max(sizes)
        assert sum(counted) <= room or alone or not under_way

    for rank in order:
        if pushes.lets_in(rank, sizes[rank]):
            under_way.append(rank)
        else:
            pushes.put(rank, sizes[rank], rank)
    for move in (*moves, *["arrive", "take", "leave"] * NUM_RANKS):
        if move == "arrive" and under_way:
            here.append(under_way.pop(0))
            pushes.arrived(here[-1])
        elif move == "take" and here:
            rank = here.pop(0)
            pushes.taken(sizes[rank])
            pushes.leaving.begin(rank, sizes[rank])
            came.append(rank)
            leaving.append(rank)
        elif move == "leave" and leaving:
            pushes.leaving.end(leaving.pop(0))
        look()
    assert sorted(came) == list(range(NUM_RANKS)) and not len(pushes)


def test_whose_turn_it_is_comes_first_and_whose_it_is_not_stays(clock):
    pushes = PushesAtSenders()
    pushes.upto = 3
    for rank in (9, 5, 4):
        assert not pushes.lets_in(rank, 8)
        pushes.put(rank, 8, rank)
    assert pushes.lets_in(2, 8) and pushes.take() is None
    pushes.upto = 5
    assert [pushes.take(), pushes.take(), pushes.take()] == [4, 5, None]
    pushes.upto = None
    assert pushes.take() == 9


@pytest.mark.parametrize("num_stopped", [1, 3])
def test_senders_and_receivers_that_have_stopped_hold_up_nobody_for_long(clock, num_stopped):
    pushes = PushesAtSenders(room_bytes=10)
    assert pushes.lets_in(0, 8) and not pushes.lets_in(1, 8)
    for rank in range(num_stopped):
        pushes.leaving.begin(("answer", rank), 8)
    clock[0] += PATIENCE_S + 1
    for rank in range(1, 5):  # one after the other, at once
        assert pushes.lets_in(rank, 8) and not pushes.lets_in(9, 8)
        pushes.arrived(rank)
        assert not pushes.lets_in(9, 8)
        pushes.taken(8)


def test_a_payload_that_goes_to_several_ranks_is_one(clock):
    pushes = PushesAtSenders(room_bytes=20)
    for _ in range(3):
        pushes.leaving.begin("model", 8)
    assert pushes.lets_in(0, 8)
    pushes.arrived(0)
    pushes.taken(8)
    for _ in range(3):
        pushes.leaving.end("model")
    assert pushes.leaving.num_bytes == 0 and pushes.lets_in(1, 20)
