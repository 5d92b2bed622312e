"""The set of what a shard has processed, against a plain set; and what a dealer makes of several that differ."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import WireError
from mpitrain.messages import Lease
from mpitrain.roles.server.leases import Leases
from mpitrain.strategies import Async, Sync
from mpitrain.strategies.parameter_server.processed import ProcessedSamples, in_all, in_any, torn
from mpitrain.strategies.sampling.dealer import BatchDealer

SAMPLES, EPOCHS = 12, 3


def plain(processed):
    return {(epoch, i) for epoch, start, end in processed.all_runs() for i in range(start, end)}


@given(
    st.lists(
        st.tuples(st.integers(0, EPOCHS - 1), st.integers(0, SAMPLES), st.integers(0, SAMPLES)), max_size=30
    )
)
def test_it_is_a_set(runs):
    processed, model = ProcessedSamples(SAMPLES), set()
    for epoch, start, end in runs:
        processed.put(epoch, start, end)
        model |= {(epoch, i) for i in range(start, end)}
        assert plain(processed) == model and processed.num_samples() == len(model)
    again = ProcessedSamples.of(json.loads(json.dumps(processed.state())), SAMPLES)
    assert again == processed == processed.copy()
    for epoch, first in ((epoch, first) for epoch in range(EPOCHS) for first in range(SAMPLES)):
        assert processed.has(Lease(epoch, first, 1)) == ((epoch, first) in model)


def test_complete_epochs_are_one_number_and_a_lease_is_judged_whole():
    processed = ProcessedSamples(SAMPLES)
    assert all(processed.add(Lease(epoch, start, 3)) for epoch in range(100) for start in (9, 0, 6, 3))
    assert processed.state() == {"complete": 100, "runs": {}}
    assert (
        processed.add(Lease(100, 3, 3))
        and not processed.add(Lease(100, 3, 3))
        and not processed.add(Lease(7, 0, 3))
    )
    with pytest.raises(WireError, match="in part"):
        processed.add(Lease(100, 4, 3))


@settings(max_examples=200)
@given(st.data())
def test_a_dealer_deals_again_what_not_every_shard_has_judged_in_leases_of_one_fate(data):
    """Whatever each shard has processed of what was dealt, up to a moment of its own."""
    dealer = BatchDealer(SAMPLES, EPOCHS, 2, num_workers=2, window_samples=4)
    dealt = [dealer.deal(data.draw(st.integers(0, 1))) for _ in range(data.draw(st.integers(1, 16)))]
    cut = data.draw(st.integers(0, len(dealt)))  # the moment of the dealer's own shard
    own = [lease for lease in dealt[:cut] if data.draw(st.booleans())]
    before = BatchDealer(SAMPLES, EPOCHS, 2, num_workers=2, window_samples=4)
    replay = BatchDealer(SAMPLES, EPOCHS, 2, num_workers=2, window_samples=4)
    for lease in dealt[:cut]:
        worker = next(w for w, held in dealer.outstanding.items() if lease in held)
        assert replay.deal(worker) == lease
        if lease in own:
            replay.outstanding[worker].remove(lease)
    before.restore(json.loads(json.dumps(replay.state())), (0, 1))
    shards = [own] + [
        [one for one in dealt if data.draw(st.booleans())] for _ in range(data.draw(st.integers(0, 2)))
    ]
    sets = []
    for leases in shards:
        sets.append(ProcessedSamples(SAMPLES))
        for lease in leases:
            sets[-1].add(lease)
    plains = [plain(one) for one in sets]
    assert plain(in_all(sets)) == set.intersection(*plains) and plain(in_any(sets)) == set.union(*plains)
    apart = {(epoch, i) for epoch, start, end in torn(sets) for i in range(start, end)}
    assert apart == set.union(*plains) - set.intersection(*plains)
    before.rejoin(sets)
    again = BatchDealer(SAMPLES, EPOCHS, 2, num_workers=3, window_samples=4)  # once more, with another worker
    again.restore(json.loads(json.dumps(before.state())), (0, 1, 2))
    seen = []
    asks = itertools.cycle(range(3))
    while (lease := next((got for _ in range(3) if (got := again.deal(next(asks)))), None)) is not None:
        seen += [(lease.epoch, i) for i in range(lease.start, lease.start + lease.num_samples)]
        for one in sets:
            one.add(lease)
    assert len(seen) == len(set(seen))
    assert all(one.num_samples() == SAMPLES * EPOCHS for one in sets)
    assert set(seen) >= {(e, i) for e in range(EPOCHS) for i in range(SAMPLES)} - set.intersection(*plains)


@given(
    num_workers=st.integers(1, 6),
    fewer=st.integers(1, 6),
    ahead=st.sets(st.integers(0, 19), max_size=8),
    dealt=st.integers(0, 12),
)
def test_what_nobody_owns_and_what_those_who_are_gone_owned_are_all_dealt(num_workers, fewer, ahead, dealt):
    """Holes that another shard has processed, and then a start with fewer workers."""

    def start(position, workers):
        leases = Leases(
            Async(servers=2), BatchDealer(40, 1, 2, num_workers=workers, window_samples=4), workers, 2
        )
        if position is not None:
            leases.restore(json.loads(json.dumps(position)), tuple(range(workers)))
        return leases

    first, own, other = start(None, num_workers), ProcessedSamples(40), ProcessedSamples(40)
    for index in range(dealt):
        worker = index % num_workers
        if first.dealer.deal(worker):
            own.add(lease := first.dealer.settle_lease(worker))
            other.put(0, lease.start, lease.start + lease.num_samples)
    for number in ahead:
        other.put(0, 2 * number, 2 * number + 2)
    again = start(first.state(tuple(range(num_workers))), num_workers)
    again.dealer.rejoin([own, other])
    last = start(again.state(tuple(range(num_workers))), fewer)
    while list(filter(None, [last.dealer.deal(worker) for worker in range(fewer)])):
        for worker in range(fewer):
            for _ in list(last.dealer.outstanding.get(worker, [])):
                assert own.add(last.dealer.settle_lease(worker))
    assert own.num_samples() == 40


def test_what_is_left_of_an_epoch_is_nobodys_in_a_state_where_workers_are_not_ranks_from_0():
    """Where rank 0 is a server."""
    leases = Leases(Sync(), BatchDealer(40, 1, 4, num_workers=2), 2, 4)
    leases.dealer._lay_out([(0, 2), (10, 2), (20, 1)])
    again = Leases(Sync(), BatchDealer(40, 1, 4, num_workers=2), 2, 4)
    again.restore(json.loads(json.dumps(leases.state((1, 2)))), (1, 2))
    assert again.dealer.left() == leases.dealer.left() == [(0, 2), (10, 2), (20, 1)]


def test_what_shards_judge_apart_is_dealt_first_in_order_and_counts_as_dealt_once():
    """Of a run of six batches the dealer's own shard has the first two, the other one the first, third and fourth."""
    dealer = BatchDealer(40, 1, 2, num_batches=6)
    dealt = [dealer.deal(0) for _ in range(2)]
    for _ in dealt:
        dealer.settle_lease(0)
    own, other = ProcessedSamples(40), ProcessedSamples(40)
    for lease in dealt:
        own.add(lease)
    other.put(0, 0, 2)
    other.put(0, 4, 8)
    again = BatchDealer(40, 1, 2, num_batches=6)
    again.restore(json.loads(json.dumps(dealer.state())))
    again.rejoin([own, other])
    leases = list(iter(lambda: again.deal(0), None))
    assert [lease.start for lease in leases[:3]] == [2, 4, 6], "what is apart comes first"
    for lease in leases:
        for one in (own, other):
            one.add(lease)
    starts = {0} | {lease.start for lease in leases}
    assert len(starts) == 6 and len(leases) == 5, "as many batches as were asked for, none of them twice"
    assert own.num_samples() == other.num_samples() == 12
