"""StepPartition of workers in lockstep: what a server would deal, every sample once, and everybody equally often."""

import json
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpitrain.errors import CheckpointError, UsageError
from mpitrain.roles.server.leases import Leases
from mpitrain.strategies import Hybrid, Sync
from mpitrain.strategies.sampling.dealer import BatchDealer, share_out
from mpitrain.strategies.sampling.epoch_steps import CutSteps, EpochSteps, Layout
from mpitrain.strategies.sampling.peer_partition import PeerPartition
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition

SIZES = {
    "num_samples": st.integers(1, 400),
    "batch_size": st.integers(1, 9),
    "num_workers": st.integers(1, 6),
    "window": st.integers(1, 60),
}


def drain(rounds, limit=10**6):
    """The rounds until the end of the epoch, or so many of them."""
    found = []
    while len(found) < limit and (step := rounds.take_step()) is not None:
        found.append(list(step.leases))
        rounds.peek()  # as a trainer does, to read ahead
        rounds.settle_step()
    return found


class DealtLeaseByLease:
    """The same by the dealer's own calls, for all workers in turn: what `StepPartition` did before it followed openings
    alone. The slow way, and the plain one."""

    def __init__(self, num_samples, batch_size, num_workers, window, drop_last=False):
        self.num_samples, self.drop_last, self.full = num_samples, drop_last, num_workers * batch_size
        self.num_workers, self.batch_size = num_workers, batch_size
        self.dealer = BatchDealer(num_samples, 1 << 62, batch_size, None, False, num_workers, window)

    def take_step(self):
        left = sum(count for _, count in self.dealer.left())
        drops = self.drop_last and self.num_samples >= self.full and left < self.full
        if left < self.num_workers or drops:
            return None
        if left < self.full:
            return self.dealer._cut_evenly(self.num_workers)
        leases = [self.dealer.deal(worker) for worker in range(self.num_workers)]
        for worker in range(self.num_workers):
            self.dealer.settle_lease(worker)
        return leases

    def go_on_from(self, before):
        """With other workers or batches than one of these had."""
        self.dealer.restore(json.loads(json.dumps(before.dealer.state())))
        if self.full != before.full or self.num_workers != before.num_workers:
            self.dealer.lay_out_anew()


def positions(found):
    return [
        at
        for leases in found
        for lease in leases
        for at in range(lease.start, lease.start + lease.num_samples)
    ]


@given(
    **SIZES,
    new_batch=st.none() | st.integers(1, 9),
    new_workers=st.none() | st.integers(1, 6),
    stop=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_once_over_any_resume_and_everybody_in_every_round(
    num_samples, batch_size, num_workers, window, new_batch, new_workers, stop
):
    before = StepPartition(num_samples, batch_size, num_workers, window)
    found = drain(before, stop)
    state = json.loads(json.dumps(before.state()))
    after = StepPartition(num_samples, new_batch or batch_size, new_workers or num_workers, window)
    left = num_samples - len(positions(found))
    if after.batch_size != batch_size and num_workers <= left < num_samples:
        with pytest.raises(UsageError, match=f"batch_size was {batch_size}, this job's is {new_batch}"):
            after.restore(state)
        return
    after.restore(state)
    rest = drain(after)
    left_out = after.next_epoch()
    assert left_out < after.num_workers
    seen = positions(found + rest)
    assert len(seen) == len(set(seen)) == num_samples - left_out
    for rounds, leases in [(before, leases) for leases in found] + [(after, leases) for leases in rest]:
        assert len(leases) == rounds.num_workers
        assert all(0 < lease.num_samples <= rounds.batch_size for lease in leases)
    if (after.num_workers, after.batch_size) == (num_workers, batch_size):  # it goes on as it was
        assert found + rest == drain(StepPartition(num_samples, batch_size, num_workers, window))
    again = drain(after)
    assert {lease.epoch for leases in again for lease in leases} <= {1}
    assert len(set(positions(again))) == num_samples - after.next_epoch()


LEG = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(0, 200))  # batch size, workers, steps


@given(
    st.integers(1, 3000), st.integers(1, 60), st.booleans(), st.lists(LEG, min_size=1, max_size=4), st.data()
)
@settings(max_examples=300, deadline=None)
def test_a_rank_finds_its_own_lease_as_if_everybody_had_been_dealt_to(
    num_samples, window, drop_last, legs, data
):
    """All ranks, sizes and rests, over several epochs, resumes and changes of the number of workers."""
    slow = everybody = own = None
    for batch_size, num_workers, num_steps in legs:
        sizes = num_samples, batch_size, num_workers, window, drop_last
        rank = data.draw(st.integers(0, num_workers - 1))
        before = slow, everybody, own
        slow, everybody = DealtLeaseByLease(*sizes), StepPartition(*sizes)
        own = StepPartition(*sizes, workers=(rank,))
        if before[0] is not None:
            assert before[1].state() == before[2].state()
            state = json.loads(json.dumps(before[2].state()))
            try:
                everybody.restore(state)
            except UsageError:  # other batches in the middle of an epoch
                return
            own.restore(state)
            slow.go_on_from(before[0])
        for _ in range(num_steps):
            leases = slow.take_step()
            step, mine = everybody.take_step(), own.take_step()
            if leases is None:
                assert step is None and mine is None
                left = sum(count for _, count in slow.dealer.left())
                slow.dealer.skip_rest()
                assert everybody.next_epoch() == own.next_epoch() == left
            else:
                counts = [lease.num_samples for lease in leases]
                assert list(step.leases) == leases and mine.leases == (leases[rank],)
                assert step[1:] == mine[1:] == (sum(counts), max(counts))
                everybody.settle_step(), own.settle_step()


@pytest.mark.parametrize(
    ("stretches", "cursor"),
    [({0: (0, 600), 1: (700, 704), 2: (800, 808)}, 1000), ({0: (0, 2), 1: (10, 11), 2: (20, 23)}, 40)],
    ids=["one worker has far more than the others", "nobody has a full batch at first"],
)
def test_a_rank_finds_its_own_lease_in_what_others_have_left(stretches, cursor):
    slow = DealtLeaseByLease(5000, 4, 3, 4)
    slow.dealer.stretches, slow.dealer.cursor = dict(stretches), cursor
    fast = StepPartition(5000, 4, 3, 4)
    layout = [[owner, *run] for owner, run in stretches.items()]
    fast.restore(fast.state() | {"cursor": cursor, "stretches": layout})
    while (leases := slow.take_step()) is not None:
        counts = [lease.num_samples for lease in leases]
        assert fast.take_step() == (tuple(leases), sum(counts), max(counts))
    assert fast.take_step() is None


def calls_of(num_workers):
    """Functions called for one rank's steps in an epoch of a thousand; the openings of the first steps left out."""
    partition = StepPartition(1000 * 4 * num_workers, 4, num_workers, 16, workers=(0,))
    drain(partition, 100)
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        drain(partition, 500)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_step_costs_as_much_among_a_thousand_workers_as_among_two():
    few, many = calls_of(2), calls_of(1024)
    assert many < 1.2 * few, (few, many)


def test_a_position_in_the_data_is_as_short_among_a_thousand_workers_as_among_two():
    states = []
    for num_workers in (2, 1024):
        partition = StepPartition(10**6, 4, num_workers, 16, workers=(0,))
        drain(partition, 50)
        states.append(json.dumps(partition.state()))
    assert len(states[1]) < len(states[0]) + 10


def test_a_position_of_another_version_is_refused():
    with pytest.raises(
        CheckpointError, match="lacks window, epoch, cursor, stretches, steps: another version"
    ):
        StepPartition(40, 4, 2, 8).restore({"workers": 2, "batch_size": 4, "dealer": {}})


@given(**SIZES, drop_last=st.booleans())
def test_within_one_window_rounds_are_contiguous_global_batches(
    num_samples, batch_size, num_workers, window, drop_last
):
    """So a batch of N workers with b samples each is that of one worker with N b."""
    full, expected = num_workers * batch_size, []
    for start in range(0, num_samples, full):
        count = min(full, num_samples - start)
        if count >= num_workers and (count == full or not drop_last or num_samples < full):
            expected.append([share_out(start, count, num_workers, worker) for worker in range(num_workers)])
    rounds = StepPartition(num_samples, batch_size, num_workers, max(window, num_samples), drop_last)
    assert [[lease[1:3] for lease in leases] for leases in drain(rounds)] == expected


@given(
    num_samples=st.integers(1, 60), batch_size=st.integers(1, 9), num_workers=st.integers(1, 6),
    drop_last=st.booleans(), cursor=st.integers(0, 60),
)  # fmt: skip
def test_what_is_cut_from_one_run_is_what_is_dealt_of_one_window(
    num_samples, batch_size, num_workers, drop_last, cursor
):
    layout, workers = Layout({}, min(cursor, num_samples)), range(num_workers)
    assume(num_samples >= num_workers)
    dealt = EpochSteps(num_samples, batch_size, num_workers, num_samples, drop_last, layout, workers)
    cut, number = CutSteps(num_samples, batch_size, num_workers, drop_last, layout, workers), 0
    while (step := dealt.step(number, 2)) is not None:
        assert cut.step(number, 2) == step and cut.num_left(number) == dealt.num_left(number)
        number += 1
    assert cut.step(number, 2) is None and cut.num_left(number) == dealt.num_left(number)


@given(
    num_samples=st.integers(1, 60), num_epochs=st.integers(1, 3), batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 6), drop_last=st.booleans(), num_steps=st.none() | st.integers(1, 30),
)  # fmt: skip
def test_a_course_takes_the_turns_of_peers_and_knows_when_the_last_is_taken(
    num_samples, num_epochs, batch_size, num_workers, drop_last, num_steps
):
    assume(num_samples >= num_workers)
    rank = num_workers - 1
    sizes = num_samples, batch_size, num_workers, num_samples, drop_last, (rank,)
    course = StepCourse(StepPartition(*sizes), num_epochs, num_steps)
    peer = PeerPartition(num_samples, num_epochs, batch_size, num_workers, rank, num_steps, drop_last)
    while course.goes_on:
        ahead, turn = peer.peek(), course.next_turn()
        assert course.has_step is (peer.peek() is not None) or turn is not None
        if turn is not None:
            expected = peer.next()
            assert expected == ahead and course.has_step is (peer.peek() is not None)
            assert (turn.step, turn.lease, turn.epoch) == (expected.step, expected.lease, expected.epoch)
            assert turn.num_samples == expected.num_samples
    assert peer.next() is None and course.num_left_out == peer.num_left_out


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 6),
    cursor=st.integers(0, 60),
)
def test_a_position_that_is_a_cursor_goes_on_with_the_samples_behind_it(
    num_samples, batch_size, num_workers, cursor
):
    """As checkpoints of split models held it, whatever the number of replicas is now."""
    assume(num_samples >= num_workers)
    rounds = StepPartition(num_samples, batch_size, num_workers, num_samples)
    rounds.restore(rounds.state_at(2, min(cursor, num_samples), batch_size))
    found = positions(drain(rounds))
    assert found == list(range(min(cursor, num_samples), num_samples - rounds.next_epoch()))
    assert rounds.epoch == 3 and len(positions(drain(rounds))) + rounds.next_epoch() == num_samples


def dealt_by_server(strategy, rounds, num_samples, num_rounds, drop_last, window):
    """The leases of so many rounds, and how many samples were left out, over the calls that a server makes: leases
    ahead at first, then one with every answer."""
    workers = list(range(rounds.num_workers))
    dealer = BatchDealer(num_samples, 2, rounds.batch_size, None, drop_last, rounds.num_workers, window)
    leases = Leases(strategy, dealer, rounds.num_workers, rounds.batch_size)
    leases.first(workers, set(workers))
    dealt = {worker: leases.take_leases(worker, 0, set(workers)) for worker in workers}
    for _ in range(num_rounds):
        for worker in workers:
            leases.settle_lease(worker)
            dealt[worker] += leases.take_leases(worker, 1, set(workers))
    found = [list(leases) for leases in zip(*(dealt[worker] for worker in workers), strict=True)]
    return found, dealer.num_left_out


@given(**SIZES, drop_last=st.booleans())
def test_they_are_what_a_server_deals_in_lockstep(num_samples, batch_size, num_workers, window, drop_last):
    """Two epochs. The last round of an epoch, too, but for a rest of less than a sample for each, which servers deal
    and these leave out."""
    assume(num_samples >= num_workers * batch_size or not drop_last)
    rounds = StepPartition(num_samples, batch_size, num_workers, window, drop_last)
    found = drain(rounds)
    left_out = rounds.next_epoch()
    assume(drop_last or not left_out)
    found += drain(rounds)
    dealt = dealt_by_server(Sync(), rounds, num_samples, len(found), drop_last, window)
    assert dealt == (found, 2 * left_out)


@given(**SIZES, drop_last=st.booleans())
def test_they_are_what_a_server_deals_where_workers_all_reduce(
    num_samples, batch_size, num_workers, window, drop_last
):
    """Two epochs, whatever their rest: everybody is dealt as many leases."""
    assume(num_samples >= num_workers)
    rounds = StepPartition(num_samples, batch_size, num_workers, window, drop_last)
    found = drain(rounds)
    left_out = rounds.next_epoch()
    found += drain(rounds)
    dealt = dealt_by_server(Hybrid(), rounds, num_samples, len(found), drop_last, window)
    assert dealt == (found, 2 * left_out)


@given(**SIZES, num_epochs=st.integers(1, 3), cut=st.integers(0, 40))
def test_in_lockstep_servers_deal_every_sample_once_over_a_resume_and_with_fewer_workers(
    num_samples, batch_size, num_workers, window, num_epochs, cut
):
    """Whatever the rest is, and whoever is there."""
    seen = []

    def serve(dealer, workers, limit):
        while limit and any(give(dealer, worker, workers) for worker in workers):
            limit -= 1

    def give(dealer, worker, workers):
        lease = dealer.deal(worker, together=workers)
        if lease is not None:
            dealer.settle_lease(worker)
            seen.extend((lease.epoch, at) for at in range(lease.start, lease.start + lease.num_samples))
        return lease is not None

    before, after = (
        BatchDealer(num_samples, num_epochs, batch_size, num_workers=num_workers, window_samples=window)
        for _ in "12"
    )
    serve(before, range(num_workers), cut)
    give(before, 0, range(num_workers))  # and in the middle of a round
    fewer = range(1, num_workers) or range(1)
    after.restore(json.loads(json.dumps(before.state())), tuple(fewer))
    serve(after, fewer, -1)
    assert sorted(seen) == [(epoch, at) for epoch in range(num_epochs) for at in range(num_samples)]


@given(num_batches=st.integers(1, 30), batch_size=st.integers(1, 9))
def test_in_lockstep_a_limit_in_batches_is_exact(num_batches, batch_size):
    dealer = BatchDealer(23, 1, batch_size, num_batches, num_workers=3)
    leases = [dealer.deal(turn % 3, together=(0, 1, 2)) for turn in range(num_batches + 5)]
    assert sum(lease is not None for lease in leases) == num_batches


def test_each_rank_reads_windows_that_nobody_else_reads():
    """Shared contiguously, each of the 400 windows would be read by all 4 ranks; in stretches of up to 16 windows only
    those in which two stretches meet are read by two."""
    readers = {}
    for leases in drain(StepPartition(40_000, 16, 4, 100)):
        for worker, lease in enumerate(leases):
            for window in range(lease.start // 100, (lease.start + lease.num_samples - 1) // 100 + 1):
                readers.setdefault(window, set()).add(worker)
    reads = sum(map(len, readers.values()))
    assert len(readers) == 400 and reads < 1.2 * 400


@pytest.mark.parametrize(("num_samples", "left_out"), [(9, 3), (5, 0)])
def test_an_incomplete_last_round_may_be_left_out_unless_there_is_no_other(num_samples, left_out):
    """An epoch of none would never end a run of so many steps."""
    rounds = StepPartition(num_samples, 3, 2, 2, drop_last=True)
    assert len(drain(rounds)) == 1
    assert rounds.next_epoch() == left_out


def test_whether_an_epoch_is_over_is_a_matter_of_the_rounds_that_it_was_dealt_in():
    """Nine samples by six leave three out; so the next rounds may be of twelve, of which there is no complete one."""
    before = StepPartition(9, 3, 2, 2, drop_last=True)
    assert len(drain(before)) == 1
    after = StepPartition(9, 6, 2, 2, drop_last=True)
    after.restore(before.state())
