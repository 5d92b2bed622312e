"""Shards put together from pieces of others that had processed different pushes: every number takes every lease
once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.roles.server.resharding import processed_by, reshard_role
from mpitrain.strategies.parameter_server.processed import ProcessedSamples
from mpitrain.strategies.sampling.dealer import BatchDealer

NUMBERS, SAMPLES = 12, 8  # of the model, and of one epoch


def cuts_of(num_shards):
    return [NUMBERS * i // num_shards for i in range(num_shards + 1)]


def fresh():
    counts = {"samples_accepted": 0, "samples_dropped": 0}
    return {
        "processed": ProcessedSamples(SAMPLES).state(),
        "pieces": [],
        "ledger": counts,
        "applied_samples": 0,
    }


class Shard:
    """What a server does with a push: counted once, and added where no piece has it."""

    def __init__(self, state, low, taken):
        self.state, self.low, self.taken = state, low, taken
        self.processed = ProcessedSamples.of(state["processed"], SAMPLES)
        self.pieces = [
            (start, end, ProcessedSamples.of(piece, SAMPLES)) for start, end, piece in state["pieces"]
        ]

    def push(self, lease, size):
        if not self.processed.add(lease):
            return
        self.state["processed"] = self.processed.state()
        self.state["ledger"]["samples_accepted"] += lease.num_samples
        masked = {i for start, end, piece in self.pieces if piece.has(lease) for i in range(start, end)}
        for number in set(range(size)) - masked:
            self.taken[self.low + number].append(lease)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_however_often_it_is_cut_anew_every_number_takes_every_sample_once(data):
    taken = [[] for _ in range(NUMBERS)]
    num_shards = data.draw(st.integers(1, 4))
    states = [fresh() for _ in range(num_shards)]
    dealer = BatchDealer(SAMPLES, 1, 2)
    for last in [False] * data.draw(st.integers(1, 3)) + [True]:
        before, num_shards = cuts_of(num_shards), data.draw(st.integers(1, 4))
        cuts, position = cuts_of(num_shards), dealer.state()
        dealer = BatchDealer(SAMPLES, 1, 2)
        dealer.restore(position)
        dealer.rejoin(processed_by(states, SAMPLES))
        states = [reshard_role(states, before, low, high, SAMPLES) for low, high in zip(cuts, cuts[1:])]
        shards = [Shard(state, low, taken) for state, low in zip(states, cuts)]
        while (lease := dealer.deal(0)) is not None and (last or data.draw(st.integers(0, 3))):
            for number, shard in enumerate(shards):
                if last or data.draw(st.booleans()):
                    shard.push(lease, cuts[number + 1] - cuts[number])
            if ProcessedSamples.of(states[0]["processed"], SAMPLES).has(lease):  # the dealing server has it
                dealer.settle_lease(0)
            else:
                dealer.take_back(0)
                break
        dealer.take_back(0)
    for leases in taken:
        samples = sorted(i for lease in leases for i in range(lease.start, lease.start + lease.num_samples))
        assert samples == list(range(SAMPLES))
    assert [state["ledger"]["samples_accepted"] for state in states] == [SAMPLES] * num_shards
