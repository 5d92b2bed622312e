"""The doorbell and the board between threads that stand for ranks: no ring is missed, nothing is written over."""

import ctypes
import functools
import mmap
import os
import threading
from array import array

import pytest

from mpitrain.errors import UsageError
from mpitrain.mpi.engine import doorbell
from mpitrain.mpi.engine.board import GAVE_UP, Board, num_bytes
from mpitrain.mpi.engine.doorbell import THREAD, Doorbell, SharedMemory
from mpitrain.mpi.engine.resting import Spins
from mpitrain.mpi.engine.wakeup import Wakeup
from mpitrain.system.launched.launch_variables import are_shared

pytestmark = pytest.mark.skipif(
    bool(doorbell.why_not("none")), reason="no doorbell here: " + doorbell.why_not("none")
)
SLOT_BYTES = 64
DEADLINE_S = 60.0


def make_boards(num_ranks):
    """Those of a group, each in a mapping of its own."""
    bells = [Doorbell(rank) for rank in range(num_ranks)]
    length = num_bytes(num_ranks, SLOT_BYTES)
    made = SharedMemory.made(length)
    boards = []
    for rank in range(num_ranks):
        peers = [doorbell.Peer(bell.memory.place) for bell in bells if bell is not bells[rank]]
        memory = SharedMemory.at(made.place, length)
        boards.append(Board(memory, rank, num_ranks, SLOT_BYTES, bells[rank], peers))
    return boards


def in_threads(boards, act):
    """Have each rank act in a thread of its own; raise what one of them raises."""
    failures = []

    def run(board, rank):
        try:
            act(board, rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in zip(boards, range(len(boards)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"


def wait_for(board):
    """As the communication thread does."""
    wakeup = Wakeup(THREAD)
    wakeup.bell = board.bell
    board.bell.want(THREAD)
    while not board.is_complete():
        wakeup.wait_for_ring(0.2, board.is_complete)
    board.bell.want(0)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_who_comes_last_wakes_those_that_sleep_and_no_ring_is_missed(num_ranks):
    boards, num_steps = make_boards(num_ranks), 400

    def act(board, rank):
        for step in range(num_steps):
            own = ctypes.create_string_buffer(f"{step} of {rank}".encode(), SLOT_BYTES)
            leave = functools.partial(board.copy_in, ctypes.addressof(own), SLOT_BYTES)
            board.post(array("Q", (step, 0, 0)), leave)
            wait_for(board)
            assert board.are_alike(array("Q", (step, 0, 0)))
            for other in range(num_ranks):
                left = board.memory.map[board.offset(other) :][:SLOT_BYTES]
                assert left.rstrip(b"\0") == f"{step} of {other}".encode()

    in_threads(boards, act)
    bells = [board.bell for board in boards]
    num_sleeps = sum(bell.num_sleeps for bell in bells)
    assert num_sleeps > 0 and sum(bell.num_rung for bell in bells) > 0
    # a rank may lose its core between its arrival and its ring, for longer than others sleep
    assert sum(bell.num_missed for bell in bells) <= num_sleeps // 20


def test_nobody_is_rung_who_does_not_wait():
    first, second = make_boards(2)
    first.post(array("Q", (1, 0, 0)))
    second.post(array("Q", (1, 0, 0)))
    assert first.is_complete() and second.is_complete() and first.bell.num_rung == second.bell.num_rung == 0
    first.bell.want(THREAD)
    first.post(array("Q", (2, 0, 0)))
    before = first.bell.value(THREAD)
    second.post(array("Q", (2, 0, 0)))
    assert second.bell.num_rung == 1 and first.bell.value(THREAD) != before
    assert first.bell.sleep(THREAD, before, DEADLINE_S), "a ring before the sleep ends it"


def test_a_sleep_that_its_limit_ends_although_its_end_was_there_is_counted():
    first, second = make_boards(2)
    wakeup = Wakeup(THREAD)
    wakeup.bell = first.bell
    first.bell.want(THREAD)
    first.post(array("Q", (1, 0, 0)))
    second.bell.ring = lambda peers: None  # broken: it comes, and does not ring
    looks = iter([False, True])

    def has_come():
        come = next(looks)
        if not come:
            second.post(array("Q", (1, 0, 0)))
        return come

    wakeup.wait_for_ring(0.01, has_come)
    assert first.bell.num_missed == 1


def test_what_ranks_say_is_added_up_and_who_has_given_up_is_at_every_step_to_come():
    boards = make_boards(3)
    for board in boards:
        board.post(array("Q", (2**63 + 5, 2**64 - 1 if board is boards[0] else 0, board is boards[2])))
    assert boards[1].sums() == [(3 * (2**63 + 5)) % 2**64, 2**64 - 1, 1]
    assert not boards[0].are_alike(array("Q", (2**63 + 5, 2**64 - 1, 0)))
    boards[2].give_up()
    for _ in range(3):
        for board in boards[:2]:
            board.post(array("Q", (7, 0, 0)))
        assert boards[0].is_complete() and boards[0].sums()[2] >= GAVE_UP


def test_memory_of_another_process_is_known_by_its_cookie():
    memory = SharedMemory.made(4096)
    other = memory.place._replace(cookie="00" * 16)
    for place, length in ((other, 4096), (memory.place, 8192), (memory.place._replace(file=10**6), 4096)):
        with pytest.raises(OSError):
            SharedMemory.at(place, length)
    assert SharedMemory.at(memory.place, 4096).map[:16].hex() == memory.place.cookie
    memory.close()


def test_memory_is_taken_when_it_is_first_written():
    memory = SharedMemory.made(1 << 20)
    taken = [os.fstat(memory.place.file).st_blocks * 512]
    memory.map[1 << 19] = 1
    taken.append(os.fstat(memory.place.file).st_blocks * 512)
    assert taken == [mmap.PAGESIZE, 2 * mmap.PAGESIZE]
    memory.close()


def test_where_ranks_do_not_ring(monkeypatch):
    monkeypatch.setenv(doorbell.VARIABLE, "off")
    assert doorbell.why_not("none") == "MPITRAIN_DOORBELL=off"
    monkeypatch.setenv(doorbell.VARIABLE, "maybe")
    with pytest.raises(UsageError, match="MPITRAIN_DOORBELL=maybe: it is on or off"):
        doorbell.why_not("none")
    monkeypatch.delenv(doorbell.VARIABLE)
    assert "ulfm" in doorbell.why_not("ulfm") and not doorbell.why_not("none")
    monkeypatch.setattr(doorbell.platform, "machine", lambda: "aarch64")
    assert "aarch64" in doorbell.why_not("none")


def test_ranks_share_cores_where_they_are_more_than_they_may_run_on():
    assert not are_shared([hex(1), hex(2), hex(4)]), "each is bound to its own"
    assert are_shared([hex(3), hex(3), hex(3)]) and not are_shared([hex(3), hex(3)])
    assert are_shared([hex(1), hex(1)]), "bound to the same one"
    assert not are_shared([hex((1 << os.cpu_count()) - 1)])


def waits(spins, ends_s):
    """Which of some waits, that end after so many seconds of quiet, have begun with a spin; each looks in turn at 10
    us, 100 us, 0.4 ms and a second."""
    spun = []
    for end_s in ends_s:
        looks = [spins.may_spin(quiet_s) for quiet_s in (1e-5, 1e-4, 4e-4, 1.0) if quiet_s < end_s]
        assert not any(looks[2:]), "a spin without an end"
        spun.append(looks[0])
    return spun


def test_who_shares_cores_spins_for_as_long_as_it_pays_and_tries_again_later():
    spins, soon_s, late_s = Spins(), 2e-4, 2.0
    assert all(waits(spins, [soon_s] * 200))
    found = waits(spins, [late_s] * 200)
    first = found.index(False)
    assert first <= 4 and not all(found[first:]) and 2 <= sum(found[first:]) <= 20  # a try now and then
    found = waits(spins, [soon_s] * 400)
    again = found.index(True)
    assert again < 200 and all(found[again:])
