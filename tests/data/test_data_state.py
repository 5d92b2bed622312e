"""Where a pass over batches is, saved and loaded: what is left is each sample once, whatever the number of ranks."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import mpitrain as mt
from mpitrain.errors import UsageError

SAMPLES = mt.Samples(TensorDataset(torch.arange(97)))
SIZES = st.integers(1, 4)


def taken(batches, count):
    found, passing = [], iter(batches)
    for _ in range(count):
        batch = next(passing, None)
        if batch is not None:
            found += batch["x"].tolist()
    return found, json.loads(json.dumps(batches.state_dict()))


@given(SIZES, SIZES, SIZES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 14), st.integers(0, 14))
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_once_over_two_interruptions_with_other_ranks(
    first, second, third, size, other, one, two
):
    found, state = [], None
    for ranks, batch_size, count in ((first, size, one), (second, other, two), (third, size, 99)):
        states = []
        for rank in range(ranks):
            batches = SAMPLES.batches(batch_size, seed=5, share=(rank, ranks))
            if state is None:
                batches.set_epoch(3)
            else:
                batches.load_state_dict(state)
            assert batches.epoch == 3
            got, after = taken(batches, count)
            found += got
            states.append(after)
        assert all(one == states[0] for one in states)
        state = states[0]
    assert len(found) == len(set(found))
    assert len(found) >= 97 - (third - 1)  # fewer than one for each rank are left out


def test_with_as_many_ranks_the_batches_are_those_of_a_pass_without_a_break():
    whole = [batch["x"].tolist() for batch in SAMPLES.batches(10, share=(1, 2))]
    batches = SAMPLES.batches(10, share=(1, 2))
    _, state = taken(batches, 2)
    again = SAMPLES.batches(10, share=(1, 2))
    again.load_state_dict(state)
    assert len(again) == len(whole) - 2
    assert [batch["x"].tolist() for batch in again] == whole[2:]
    assert again.state_dict() == batches.state_dict() | {"position": [[[0, 97]], 2, 10, False, len(whole), 0]}
    assert [batch["x"].tolist() for batch in again] == whole  # the next pass is a whole one
    again.set_epoch(1)
    assert again.state_dict()["position"][4] == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_from_a_loaders_workers_are_counted_by_who_takes_them(num_workers):
    batches = SAMPLES.batches(10)
    loader = iter(DataLoader(batches, None, num_workers=num_workers))
    found = [number for _ in range(3) for number in next(loader)[0].tolist()]  # torch makes lists of pairs
    with pytest.raises(UsageError, match="state_dict.batches=N, num_workers=W"):
        batches.state_dict()
    state = batches.state_dict(3, num_workers)
    del loader
    rest = SAMPLES.batches(7)
    rest.load_state_dict(state)
    found += [number for batch in rest for number in batch["x"].tolist()]
    assert sorted(found) == list(range(97))


def test_variable_arrays_are_put_together_over_a_seam(tmp_path):
    with mt.ShardWriter(tmp_path, variable=("t",)) as writer:
        writer.add({"t": ["a" * (number % 5) + "b" for number in range(40)], "y": list(range(40))})
    source = mt.Shards(f"{tmp_path}/*.h5")
    states = [source.batches(6, share=(rank, 3)) for rank in range(3)]
    found = []
    for one in states:
        found += next(iter(one))["y"].tolist()
    states[0]._given = 1
    rest = source.batches(9)
    rest.load_state_dict(states[0].state_dict())
    for batch in rest:
        lengths = batch["t_offsets"].diff()
        assert lengths.tolist() == [number % 5 + 1 for number in batch["y"].tolist()]
        assert len(batch["t"]) == lengths.sum()
        found += batch["y"].tolist()
    assert sorted(found) == list(range(40))


def test_a_state_of_other_data_is_refused():
    state = SAMPLES.batches(10).state_dict()
    with pytest.raises(UsageError, match="its seed is 0, this one's 1"):
        SAMPLES.batches(10, seed=1).load_state_dict(state)
    with pytest.raises(UsageError, match="its data is"):
        mt.Samples(TensorDataset(torch.arange(96))).batches(10).load_state_dict(state)
