"""Failure detectors by hand: what a server makes of each message and of time, and what a worker asks while it waits."""

import math

import pytest

from mpitrain.effects import Now, Recv, Send, drive
from mpitrain.errors import EvictedError, LostRankError
from mpitrain.messages import Alive, Away, Ended, Lost, Over
from mpitrain.roles.failure_detector.server_side import LOOK_EVERY_S, SILENT, FailureDetector
from mpitrain.roles.failure_detector.silence import SilenceTracker
from mpitrain.roles.failure_detector.worker_side import QUESTIONS, ServerProbe, report_failure


class Hand:
    """Drives a role: `times` are what clocks say, one after the other, or where there are none, waiting in vain takes
    its time; `messages` is what arrives."""

    def __init__(self, times=(), messages=(), now_s=0.0):
        self.times, self.messages, self.now_s = list(times), list(messages), now_s
        self.sent, self.waits = [], []

    def play(self, role):
        return drive(role, self._answer)

    def _answer(self, effect):
        if isinstance(effect, Now):
            return self.times.pop(0) if self.times else self.now_s
        if isinstance(effect, Recv):
            self.waits.append((effect.timeout_s, tuple(effect.sources)))
            answer = self.messages.pop(0)
            self.now_s += 0.0 if answer or not effect.timeout_s else effect.timeout_s
            return answer
        assert isinstance(effect, Send)
        return self.sent.append((effect.to, effect.message))


class Noting(SilenceTracker):
    """Says what it was told."""

    def __init__(self, floor_s=4.0, overdue=()):
        super().__init__(floor_s)
        self.told, self.overdue = [], overdue

    def heard(self, worker, now_s):
        self.told.append(("heard", worker, now_s))

    def reports_waiting(self, worker, now_s):
        self.told.append(("waits", worker, now_s))

    def goes_away(self, worker, for_part=False):
        self.told.append(("away", worker, for_part))

    def is_overdue(self, worker, now_s, away_s):
        self.told.append(("looked at", worker, now_s, away_s))
        return worker in self.overdue


OVER = Over(1)


def test_the_clock_goes_on_by_two_looks_at_most():
    """A server that was stopped itself has seen nobody's silence meanwhile."""
    detector, hand = (
        FailureDetector(Noting(), lambda _: False, False),
        Hand([100.0, 100.25, 500.25, 501.0], [None] * 4),
    )
    seen = []
    for _ in range(4):
        assert hand.play(detector.listen([3])) is None
        seen.append(detector.now_s)
    assert seen == [0.0, 0.25, 0.25 + 2 * LOOK_EVERY_S, 1.0 + 2 * LOOK_EVERY_S]
    assert hand.waits == [(LOOK_EVERY_S, (3,))] * 4


def test_where_time_does_not_matter_nobody_looks_at_a_clock():
    hand, tracker = Hand([], [None, (3, OVER)]), Noting(math.inf)
    detector = FailureDetector(tracker, lambda _: False, False)
    assert hand.play(detector.listen([3])) is None and hand.play(detector.listen([3])) == (3, OVER)
    assert hand.waits == [(None, (3,))] * 2 and tracker.told == [] and detector.now_s == 0.0


@pytest.mark.parametrize(
    "message, is_lost, returned, told, answered",
    [
        (Alive(), False, False, [("waits", 3, 0.5)], True),
        (Alive(), True, True, [], False),
        (Away(1), False, False, [("heard", 3, 0.5), ("away", 3, False)], False),
        (Away(1, True), False, False, [("heard", 3, 0.5), ("away", 3, True)], False),
        (Away(1, True), True, False, [("away", 3, True)], False),
        (Lost(), False, True, [], False),
        (OVER, False, True, [("heard", 3, 0.5)], False),
        (OVER, True, True, [], False),
    ],
)  # fmt: skip
def test_what_each_message_says_of_its_sender(message, is_lost, returned, told, answered):
    tracker = Noting()
    detector, hand = (
        FailureDetector(tracker, lambda _: is_lost, False),
        Hand([7.0, 7.5], [None, (3, message)]),
    )
    hand.play(detector.listen([3]))
    found = hand.play(detector.listen([3]))
    assert found == ((3, message) if returned else None)
    assert tracker.told == told and hand.sent == ([(3, Alive())] if answered else [])


def test_another_server_is_watched_by_nobody():
    tracker, message = Noting(), Ended()
    hand = Hand([1.0], [(1, message)])
    assert hand.play(FailureDetector(tracker, lambda _: False, False).listen([3])) == (1, message)
    assert tracker.told == []


def test_whoever_is_overdue_is_lost_one_at_a_time_and_is_looked_for_once_a_look():
    tracker = Noting(overdue=(2, 4, 5))
    detector = FailureDetector(tracker, lambda _: False, True)
    hand = Hand([10.0, 10.1, 10.6], [None] * 3)
    assert hand.play(detector.listen([5, 2, 3], 9.0)) == (2, Lost(SILENT))
    assert tracker.told == [("looked at", worker, 0.0, 9.0) for worker in (2, 3, 5)]
    assert hand.play(detector.listen([3], 9.0)) is None  # the other one owes nothing any more
    assert hand.play(detector.listen([4], 9.0)) is None and len(tracker.told) == 3  # not yet
    assert hand.play(detector.listen([3], 8.0)) is None and len(tracker.told) == 3
    assert hand.play(detector.listen([4], 8.0)) == (4, Lost(SILENT))
    assert tracker.told[3:] == [("looked at", 4, pytest.approx(0.6), 8.0)]


# ---- of a worker


def probe(timeout_s=4.0, signs_s=0.0, servers=(0, 1)):
    return ServerProbe(7, servers, timeout_s, signs_s)


def test_who_asks_nobody_waits_for_ever():
    hand = Hand([], [(0, OVER)])
    assert hand.play(probe(0.0).receive([0])) == (0, OVER)
    assert hand.waits == [(None, (0,))] and hand.sent == []


@pytest.mark.parametrize("served, asked", [(True, [0, 1]), (False, [1])])
def test_a_server_is_dead_that_has_left_so_many_questions_unanswered(served, asked):
    num_quiet = QUESTIONS + 1
    hand = Hand([0.0] * (1 + num_quiet), [None] * num_quiet)
    with pytest.raises(
        LostRankError, match=f"no answer of rank {', '.join(map(str, sorted(asked, key=[1, 0].index)))} "
    ):
        hand.play(probe().receive([1], served))
    assert hand.sent == [(server, Alive()) for server in asked] * QUESTIONS
    assert hand.waits == [(4.0 / QUESTIONS, (1,))] * num_quiet


def test_an_answer_in_between_begins_the_count_anew_and_a_message_is_handed_on():
    quiet = [None] * QUESTIONS
    hand = Hand(messages=[*quiet, (1, Alive()), *quiet, (1, OVER)])
    assert hand.play(probe(servers=(1,)).receive([1])) == (1, OVER)
    assert len(hand.sent) == 2 * QUESTIONS


def test_signs_of_life_judge_nobody():
    hand = Hand([0.0] * 42, [None] * 40 + [(0, OVER)])
    assert hand.play(probe(0.0, signs_s=1.5).receive([0])) == (0, OVER)
    assert len(hand.sent) == 80 and {timeout_s for timeout_s, _ in hand.waits} == {1.5}


@pytest.mark.parametrize("silent_s, error", [(3.9, LostRankError), (4.0, LostRankError), (4.1, EvictedError)])
def test_who_was_silent_itself_for_longer_than_the_timeout_leaves_alone(silent_s, error):
    """Between two receives, whatever it waits in one of them: there it asks."""
    asking, hand = probe(servers=(1,)), Hand(now_s=10.0)
    hand.messages = [(1, Alive()), *[None, None, (1, Alive())] * 5, (1, OVER)]
    assert hand.play(asking.receive([1])) == (1, OVER) and hand.now_s == 20.0
    hand.now_s += silent_s
    hand.messages = [None] * (QUESTIONS + 1)
    with pytest.raises(error):
        hand.play(asking.receive([1]))


def test_a_server_that_owes_nothing_is_asked_as_often():
    hand = Hand([0.0] * 99, [(1, Alive()), *[None, (1, Alive())] * QUESTIONS, None])
    with pytest.raises(LostRankError, match="of rank 0 "):
        hand.play(probe().receive([1]))
    assert (
        hand.sent == [(0, Alive()), (1, Alive())] * QUESTIONS
        or hand.sent == [(1, Alive()), (0, Alive())] * QUESTIONS
    )
    assert hand.messages == []
    assert not ServerProbe(7, (0,)).every_s


def test_a_server_that_has_answered_a_question_has_not_given_it_up():
    asking, num_quiet = probe(servers=(1,)), QUESTIONS + 1
    with pytest.raises(LostRankError):
        Hand([50.0] * 9, [(1, Alive()), *[None] * num_quiet]).play(asking.receive([1]))


def test_whoever_fails_says_so_to_every_server():
    hand = Hand()
    hand.play(report_failure((0, 2)))
    assert hand.sent == [(0, Lost()), (2, Lost())]
