"""The clock that stands while its process does."""

import os
import signal

import pytest

from mpitrain.system import awake
from mpitrain.system.awake import MOST_S, TICK_S, AwakeClock


def ticked(clock, raw, seconds):
    for _ in range(int(seconds / TICK_S)):
        raw[0] += TICK_S
        clock.tick()


def test_a_pause_counts_a_moment_whoever_sees_it_first():
    raw = [100.0]
    clock = AwakeClock(lambda: raw[0])
    ticked(clock, raw, 60)
    before_s = clock.now_s()
    assert before_s == 160.0 and clock.num_pauses == 0
    raw[0] += 3600.0
    assert clock.now_s() == before_s + MOST_S  # who runs before the clock's own thread does
    clock.tick()
    assert clock.now_s() == before_s + MOST_S and clock.num_pauses == 1
    ticked(clock, raw, 60)
    assert clock.now_s() == before_s + MOST_S + 60
    raw[0] += 5.0
    clock.tick()
    assert clock.num_pauses == 1  # a busy machine


def test_a_process_has_one_clock_and_a_forked_child_its_own():
    own, before_s = awake.clock(), awake.now_s()
    assert awake.clock() is own
    if (pid := os.fork()) == 0:
        os._exit(0 if awake.clock() is not own else 1)
    assert os.waitpid(pid, 0)[1] == 0
    while awake.now_s() <= before_s:
        pass


@pytest.mark.timeout(60)
def test_a_signal_that_comes_while_the_clock_begins_may_ask_for_the_time(monkeypatch):
    """As of a launch that is told to end in its first moment."""
    asked_s = []
    before = signal.signal(signal.SIGUSR1, lambda *_: asked_s.append(awake.now_s()))
    begin = awake.background.start

    def start(*words):
        if not asked_s:
            asked_s.append(0.0)
            signal.raise_signal(signal.SIGUSR1)
        begin(*words)

    monkeypatch.setattr(awake.background, "start", start)
    awake._begin_anew()
    try:
        assert awake.now_s() >= asked_s[1] > 0.0 and awake.clock() is awake.clock()
    finally:
        signal.signal(signal.SIGUSR1, before)
