"""Any rank stands still for a while before any of its steps: the run ends, with every sample counted once.

A pause comes before the n-th effect of a rank, for every n: while it starts, between gradients and messages, after its
last push, while the model is saved, and while all wait to be let go.
"""

import itertools

import pytest

from mpitrain.effects import Sleep
from mpitrain.errors import EvictedError, LostRankError
from mpitrain.strategies import Async, SoftSync, StaleSync, Sync
from tests.virtual.test_course import samples_of
from tests.virtual.worlds import all_leases, play

RULES = (Async(servers=2), Sync(servers=2), SoftSync(updates=2), StaleSync(bound=1, servers=2))
WORKERS, SAMPLES, BATCH = 3, 12, 2
PAUSES_S = (5.0, 40.0, 400.0)
MODES = {"plain": None, "heartbeat": 20.0}


class Pause:
    """Of rank `victim`, before its effect number `at`; counts its effects."""

    def __init__(self, victim, at=-1, seconds=0.0):
        self.victim, self.at, self.seconds, self.num = victim, at, seconds, 0

    def __call__(self, rank, role):
        return self.paused(role) if rank == self.victim else role

    def paused(self, role):
        answer = None
        while True:
            if self.num == self.at:
                yield Sleep(self.seconds, interruptible=False)
            self.num += 1
            try:
                effect = role.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield effect


def run(strategy, mode, pause):
    return play(
        strategy, WORKERS, num_samples=SAMPLES, batch_size=BATCH, delivers=True, heartbeat_s=MODES[mode],
        least_silence_s=3.0, around=pause,
    )  # fmt: skip


def cases(every):
    """One effect of so many."""
    for strategy, mode in itertools.product(RULES if every == 1 else RULES[::2], MODES):
        for victim in range(strategy.servers + WORKERS):
            counted = Pause(victim)
            run(strategy, mode, counted)
            for number, at in enumerate(range(counted.num)):
                if number % every == victim % every:
                    yield strategy, mode, victim, at


def check(every):
    told = {"ended": 0, "evicted": 0, "server": 0}
    for strategy, mode, victim, at in cases(every):
        for seconds in PAUSES_S:
            where = f"{strategy} {mode} rank {victim} for {seconds:g} s before effect {at}"
            try:
                ended = run(strategy, mode, Pause(victim, at, seconds))
            except EvictedError:
                assert mode == "heartbeat" and victim >= strategy.servers and seconds > 20.0, where
                told["evicted"] += 1
                continue
            except LostRankError:
                # a server: whoever waits for it cannot know that it will wake
                assert mode == "heartbeat" and victim < strategy.servers and seconds > 20.0, where
                told["server"] += 1
                continue
            told["ended"] += 1
            assert samples_of(ended.leases()) == samples_of(all_leases(SAMPLES, BATCH)), where
            assert ended.counts["samples_accepted"] == SAMPLES and ended.trace.server.delivered, where
    return told


def test_a_rank_that_stands_still_for_a_while_holds_up_no_end():
    told = check(every=23)
    assert all(told.values()), told


@pytest.mark.extended
def test_a_rank_that_stands_still_at_any_moment_holds_up_no_end():
    assert all(check(every=1).values())
