"""A worker that falls silent in virtual time: nobody waits for it in vain, and what it held is done by others."""

import math

import pytest

from mpitrain.effects import Now, Recv, Send
from mpitrain.errors import EvictedError, LostRankError
from mpitrain.inject import Stop
from mpitrain.messages import Alive, Away
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer
from mpitrain.roles.failure_detector.server_side import LOOK_EVERY_S
from mpitrain.roles.failure_detector.silence import AWAY_SILENCE_S, PATIENCE, SilenceTracker
from mpitrain.roles.failure_detector.worker_side import QUESTIONS, ServerProbe
from mpitrain.strategies import Async, Backup, Elastic, SoftSync, StaleSync, Sync, Warmup
from mpitrain.virtual import Constant
from tests.virtual.test_course import samples_of
from tests.virtual.worlds import NumberStore, Shuffled, all_leases, play


@pytest.mark.parametrize(
    "strategy",
    [
        Async(), Async(servers=3), SoftSync(updates=2), StaleSync(bound=1), Sync(),
        SoftSync(updates=3, blocking=True), Async(servers=2, inflight=2), Elastic(push_every=2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("worker", [0, 2])
def test_who_is_silent_for_too_long_is_given_up_and_its_batches_are_done_by_others(strategy, worker):
    """One of four takes ten thousand times as long from its third batch on; the end comes long before its next."""
    sizes = {"num_samples": 60, "batch_size": 2, "epochs": 2}
    slow = play(
        strategy, 4, compute=Constant(1.0, 0.01), freeze=(worker, 3, 10_000.0), least_silence_s=3.0, **sizes
    )
    assert slow.ended_s < 1000
    for trace in slow.traces:
        assert list(trace.server.table.lost.values()) == ["silent"]
    assert samples_of(slow.leases()) == samples_of(all_leases(60, 2, 2))
    assert slow.counts["samples_accepted"] + slow.counts["samples_dropped"] == 120
    left, right = slow.counts["staleness_identity"]
    assert left == right


def test_slow_is_not_silent():
    """Thirty times slower than the others from the start: its usual is known, and nobody gives it up."""
    seen = play(Async(), 4, slow={1: 30.0}, least_silence_s=3.0, num_samples=200, batch_size=1)
    assert seen.trace.server.table.lost == {}
    assert samples_of(seen.leases()) == samples_of(all_leases(200, 1))


# ---- launches in which nobody is told of a death (`heartbeat`)

RULES = [
    Async(), Async(servers=2, inflight=2), SoftSync(updates=2), StaleSync(bound=2, servers=2),
    Sync(servers=2), Backup(spare=1, servers=2), SoftSync(updates=3, blocking=True),
    Async(warmup=Warmup(1, epochs=1)),
]  # fmt: skip


def listening(victim, seen):
    """Notes when `victim` was last heard of and when it was given up, while the run goes on."""

    def look(trace):
        num_pushes = trace.clock[victim]
        if num_pushes != seen.get("num_pushes"):
            seen.update(num_pushes=num_pushes, last_s=trace.world.now_s)
        if victim in trace.server.table.lost:
            seen.setdefault("lost_s", trace.world.now_s)
            seen["after"] = sum(count for worker, count in trace.clock.items() if worker != victim)
        else:
            seen["before"] = sum(count for worker, count in trace.clock.items() if worker != victim)

    return look


@pytest.mark.parametrize("victim", [0, 3])
def test_a_death_nobody_tells_of_is_seen_at_the_timeout_while_the_others_go_on(victim):
    seen: dict = {}
    timeout_s, sizes = 40.0, {"num_samples": 400, "batch_size": 1, "epochs": 2}
    ended = play(
        Async(),
        4,
        heartbeat_s=timeout_s,
        faults=(Stop(victim, 20),),
        look=listening(victim + 1, seen),
        **sizes,
    )
    assert timeout_s < seen["lost_s"] - seen["last_s"] <= timeout_s + 2 * LOOK_EVERY_S
    assert seen["before"] > 100 and seen["after"] > seen["before"] + 100, "nobody has waited for it"
    assert ended.trace.server.table.lost == {victim + 1: "silent"}
    assert samples_of(ended.leases()) == samples_of(all_leases(400, 1, 2))


@pytest.mark.parametrize("strategy", RULES, ids=str)
@pytest.mark.parametrize("slow", [{}, {2: 20.0}])
def test_whatever_the_rule_the_dead_alone_are_given_up_and_no_sample_is_lost(strategy, slow):
    """Those who wait for the dead worker, here or at another shard, say that they wait; a slow one is known to be."""
    sizes = {"num_samples": 120, "batch_size": 2, "epochs": 2}
    ended = play(
        strategy,
        4,
        heartbeat_s=15.0,
        faults=(Stop(1, 3),),
        slow=slow,
        network=Shuffled(5, 0.2),
        seed=3,
        **sizes,
    )
    for trace in ended.traces:
        assert trace.server.table.lost == {trace.server.workers[1]: "silent"}
    assert samples_of(ended.leases()) == samples_of(all_leases(120, 2, 2))
    left, right = ended.counts["staleness_identity"]
    assert left == right and not ended.counts["failure"]


@pytest.mark.parametrize("strategy", RULES, ids=str)
def test_long_batches_are_no_silence(strategy):
    """Batches of 30 s, and others of one second, against a floor of 5 s; the first is given a minute."""
    sizes = {"num_samples": 60, "batch_size": 1}
    ended = play(strategy, 4, heartbeat_s=5.0, slow={2: 30.0}, **sizes)
    assert [trace.server.table.lost for trace in ended.traces] == [{}] * len(ended.traces)


@pytest.mark.parametrize("strategy", RULES, ids=str)
def test_one_that_was_given_up_and_wakes_leaves_alone(strategy):
    """In the middle of the run, in which nobody waits for it any more; and no sample is taken twice."""
    sizes = {"num_samples": 400, "batch_size": 1, "epochs": 2}
    ended = play(strategy, 4, heartbeat_s=15.0, freeze=(1, 9, 60.0), **sizes)
    for trace in ended.traces:
        assert trace.server.table.lost == {trace.server.workers[1]: "silent"}
    assert samples_of(ended.leases()) == samples_of(all_leases(400, 1, 2))


@pytest.mark.parametrize("strategy", [strategy for strategy in RULES if strategy.inflight == 1], ids=str)
def test_one_that_wakes_after_the_end_knows_that_it_was_given_up(strategy):
    """Nobody answers it any more, and that is not to be taken for the servers' death, which would end the job."""
    with pytest.raises(EvictedError, match="the run has gone on without it"):
        play(
            strategy,
            4,
            heartbeat_s=15.0,
            freeze=(1, 9, 1e6),
            num_samples=200,
            batch_size=1,
            epochs=2,
            delivers=True,
        )


@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_when_there_is_nothing_left_to_do_is_missed_too(victim):
    """Those who wait to be let go say so; the last batch of the run is the victim's second last word."""
    seen = play(Sync(), 3, 30, heartbeat_s=15.0, faults=(Stop(victim, 9),), delivers=True)
    (lost,) = seen.trace.server.table.lost.items()
    assert lost == (victim + 1, "silent") and seen.trace.server.delivered


def test_a_validation_is_given_the_time_it_takes():
    tracker = SilenceTracker(floor_s=5.0)

    def overdue(now_s):
        return tracker.is_overdue(1, now_s, away_s=math.inf)

    for now_s in (0.0, 1.0, 2.0):
        tracker.heard(1, now_s)
    assert overdue(10.5) and not overdue(9.5)
    tracker.goes_away(1)
    assert not overdue(10_000.0), "the first: nobody knows how long it takes"
    assert not tracker.is_silent(1, 2.0 + AWAY_SILENCE_S, mid=True)
    assert tracker.is_silent(1, 3.0 + AWAY_SILENCE_S, mid=True), "but all others do not wait for ever"
    tracker.heard(1, 102.0)
    assert overdue(102.0 + PATIENCE + 0.1), "it counts for validations alone"
    tracker.goes_away(1)
    assert not overdue(101.0 + PATIENCE * 100) and overdue(103.0 + PATIENCE * 100)
    tracker.heard(1, 200.0)
    for now_s in (201.0, 202.0):
        tracker.goes_away(1, for_part=True)
        tracker.heard(1, now_s)
    tracker.goes_away(1, for_part=True)
    assert overdue(202.0 + PATIENCE + 0.1), "a part of one takes as long as the others"
    tracker.goes_away(1)
    assert not overdue(201.0 + PATIENCE * 100), "and makes no whole one late"


def overhear(workers, arrivals):
    """A server that finds deaths by heartbeat and hears `arrivals`, each so many seconds after the one before; returns
    it."""
    server = FaultTolerantServer(
        Async(), NumberStore(0.1), workers, NullReport(), floor_s=5.0, by_heartbeat=True
    )
    steps, now_s = server._next(), 0.0
    effect = steps.send(None)
    for arrived, passed_s in arrivals:
        assert isinstance(effect, Recv)
        now_s += passed_s
        assert isinstance(steps.send(arrived), Now)
        effect = steps.send(now_s)
    return server


def test_a_pause_of_the_servers_own_is_nobodys_silence():
    heard = overhear((1, 2), [((1, Away(0)), 0.0)] + [(None, 0.5)] * 4 + [(None, 1000.0)] * 2)
    assert heard.table.lost == {} and heard.detector.now_s == 4.0


def test_without_the_rank_that_writes_the_result_the_job_ends():
    """By an error, which takes all along: nobody could tell of the rest of the run."""
    with pytest.raises(LostRankError, match="rank 0, which writes the result, silent: .* for 60.5 s"):
        overhear((0, 2), [((2, Away(0)), 0.0)] + [(None, 0.5)] * 122)


def questions(probe, answers, paused_s=0.0):
    """Feeds a probe one answer after the other, none sooner than its deadline; the ranks that were asked after each. It
    comes to ask `paused_s` after its last word."""
    steps, now_s, asked = probe.receive((0,)), probe._last_s + paused_s, []
    effect = steps.send(None)
    for answer in (..., *answers):
        effect = effect if answer is ... else steps.send(answer)
        assert isinstance(effect, Now)
        effect, now = steps.send(now_s), []
        while isinstance(effect, Send):
            assert effect.message == Alive()
            now.append(effect.to)
            effect = steps.send(None)
        asked.append(now)
        assert isinstance(effect, Recv) and effect.timeout_s == probe.timeout_s / QUESTIONS
        now_s += probe.timeout_s / QUESTIONS
    return asked[1:]


def test_a_server_that_holds_is_told_from_one_that_is_dead():
    alive, other = (0, Alive()), (1, Alive())
    probe = ServerProbe(5, (0, 1), 8.0)
    silence = [None, other] * QUESTIONS + [None]
    assert questions(probe, [None, alive, other] * 20) == [[0, 1], [], []] * 20
    with pytest.raises(LostRankError, match=r"no answer of rank 0 \(server\) for 8 s"):
        questions(probe, silence)
    assert questions(probe, silence[:-1])[-2:] == [[0, 1], []], "one question fewer is no death"
    with pytest.raises(EvictedError, match="gone on without it"):
        questions(probe, silence, paused_s=9.0)
