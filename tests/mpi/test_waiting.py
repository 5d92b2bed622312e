"""The pause law on a clock of its own, and the callbacks of an Op: no MPI, no real time."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.mpi.engine import backoff as waiting
from mpitrain.mpi.operation import Op

POLL_S = 20e-6  # what a poll of a few receives costs at most


class Clock:
    def __init__(self):
        self.now_s = 0.0
        self.slept_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s += seconds
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def poll_until(clock, backoff, end_s, transferring):
    polls = 0
    while clock.now_s < end_s:
        backoff.pause(transferring)
        clock.now_s += POLL_S
        polls += 1
    return polls


def test_nobody_sleeps_while_a_transfer_runs(clock):
    poll_until(clock, waiting.Backoff(), 0.2, transferring=True)
    assert clock.slept_s == 0


def test_an_idle_rank_uses_less_than_a_twentieth_of_a_core(clock):
    """One second without traffic: the time not slept, from the first moment on."""
    poll_until(clock, waiting.Backoff(), 1.0, transferring=False)
    assert clock.slept_s > 0.95
    assert poll_until(clock, waiting.Backoff(), 1.0, transferring=False) == 0


def test_long_naps_come_only_after_quiet_and_end_with_traffic(clock):
    backoff = waiting.Backoff()
    assert backoff.sleep_s() == 0
    clock.now_s += waiting.YIELD_S
    assert backoff.sleep_s() == waiting.SHORT_SLEEP_S
    clock.now_s += waiting.QUIET_AFTER_S
    assert backoff.sleep_s() == waiting.LONG_SLEEP_S
    assert backoff.sleep_s(arriving=True) == waiting.SHORT_SLEEP_S
    clock.now_s += waiting.QUIET_AFTER_ARRIVING_S
    assert backoff.sleep_s(arriving=True) == waiting.LONG_SLEEP_S
    backoff.traffic()
    assert backoff.sleep_s() == 0


@given(st.floats(0, 10), st.floats(0, 10))
def test_naps_never_shrink_without_traffic(earlier_s, later_s):
    earlier_s, later_s = sorted((earlier_s, later_s))
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(waiting, "time", clock)
        backoff = waiting.Backoff()
        clock.now_s = earlier_s
        first_s = backoff.sleep_s()
        clock.now_s = later_s
        assert first_s <= backoff.sleep_s() <= waiting.LONG_SLEEP_S


def test_callbacks_run_once_each_even_if_added_while_it_completes():
    """Two threads race: one completes the Op, the other adds callbacks. Each runs exactly once."""
    for _ in range(200):
        op, calls, go = Op("call"), [], threading.Barrier(2)

        def complete(op=op, go=go):
            go.wait()
            op.done = True
            op.run_callbacks()

        thread = threading.Thread(target=complete)
        thread.start()
        go.wait()
        for k in range(5):
            op.then(lambda _, k=k, calls=calls: calls.append(k))
        thread.join()
        assert sorted(calls) == list(range(5))


def test_a_wakeup_counts_once_however_often_it_was_set_and_no_wait_is_longer_than_asked():
    from mpitrain.mpi.engine.wakeup import Wakeup

    wakeup = Wakeup()
    assert (
        not wakeup.wait(0.0) and not wakeup.wait(1e-6) and not wakeup.wait(-1.0)
    )  # a time that has passed is no "for ever"
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(60.0) and not wakeup.wait(1e-6)
    waiter = threading.Thread(target=wakeup.wait)
    waiter.start()
    wakeup.set()
    waiter.join(60.0)
    assert not waiter.is_alive()


def test_a_nap_is_begun_once_left_alone_by_what_is_short_and_ended_by_what_is_not():
    from mpitrain.mpi.engine.wakeup import NappingWakeup

    wakeup, looks = NappingWakeup(), []

    def is_over():
        looks.append(True)
        return len(looks) == 3

    wakeup.nap(is_over)
    assert not looks, "nobody asked for a nap"
    wakeup.nap_next()
    assert wakeup.wait(0.0), "the sleep ends, so that the nap begins"
    wakeup.nap_next()
    assert not wakeup.wait(0.0), "it naps already"
    wakeup.nap(is_over)
    assert len(looks) == 3

    def looks_once_more():
        wakeup.set_awake()
        looks.append(True)
        if len(looks) == 5:
            wakeup.set()
        assert len(looks) < 6, "a nap that nothing ends"
        return False

    wakeup.nap_next()
    wakeup.wait(0.0)
    wakeup.nap(looks_once_more)
    assert len(looks) == 5 and not wakeup.wait(0.0)
    wakeup.set_awake()
    assert wakeup.wait(0.0), "no nap: it is set"
