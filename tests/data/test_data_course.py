"""From files to workers: each sample exactly once an epoch however it is dealt and resumed, and how well it is
mixed."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import Shards
from mpitrain.data.read.order import Order, chunk_sizes
from mpitrain.data.write.shard_file import write_shard
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.strategies.sampling.peer_partition import PeerPartition

SHARDS = st.lists(st.integers(1, 60), min_size=1, max_size=5)  # samples of each
WORKERS = st.integers(1, 6)


@given(
    counts=SHARDS,
    chunk=st.integers(1, 9),
    window=st.integers(1, 4),
    batch=st.integers(1, 9),
    workers=WORKERS,
    new_workers=WORKERS,
    asks=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    stop=st.integers(0, 200),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_settled_once_an_epoch_over_a_resume_with_other_workers(
    counts, chunk, window, batch, workers, new_workers, asks, stop, seed
):
    """What was settled before the stop and what is settled after it is each sample once for every epoch."""
    order = Order(chunk_sizes([(count, chunk) for count in counts]), window, seed)
    total, num_epochs = sum(counts), 2

    def dealer(num_workers):
        return BatchDealer(total, num_epochs, batch, None, False, num_workers, window * chunk)

    settled, before = [], dealer(workers)
    deal_and_settle(before, workers, asks, stop, settled, unsettled=2)
    state = json.loads(json.dumps(before.state()))
    after = dealer(new_workers)
    after.restore(state, tuple(range(new_workers)))
    deal_and_settle(after, new_workers, asks, 10**6, settled, unsettled=0)
    for epoch in range(num_epochs):
        runs = [lease for lease in settled if lease.epoch == epoch]
        ids = np.concatenate([order.samples(epoch, lease.start, lease.num_samples) for lease in runs])
        assert sorted(ids) == list(range(total))


def deal_and_settle(dealer, num_workers, asks, num_asks, settled, unsettled):
    """Deal to workers in the order of `asks`, all of them in turn at the end; settle all but the newest few."""
    waiting, done = [], set()
    for ask in range(num_asks):
        worker = (asks[ask % len(asks)] + ask // len(asks)) % num_workers
        if dealer.deal(worker) is None:
            done.add(worker)
            if len(done) == num_workers:
                break
            continue
        waiting.append(worker)
        if len(waiting) > unsettled:
            settled.append(dealer.settle_lease(waiting.pop(0)))
    if unsettled == 0:
        assert not any(dealer.outstanding.values())


@given(
    counts=SHARDS,
    chunk=st.integers(1, 9),
    window=st.integers(1, 4),
    batch=st.integers(1, 9),
    peers=WORKERS,
    new_peers=WORKERS,
    stop=st.integers(0, 30),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=20, deadline=None)
def test_readers_in_lockstep_read_each_sample_once_over_a_resume_with_others(
    counts, chunk, window, batch, peers, new_peers, stop, seed
):
    """Through real files and one reader a peer; what is left out is counted and nothing comes twice."""
    total = sum(counts)
    peers, new_peers = min(peers, total), min(new_peers, total)
    with tempfile.TemporaryDirectory() as directory:
        samples = np.arange(total)
        for number, end in enumerate(np.cumsum(counts).tolist()):
            rows = np.arange(end - counts[number], end)
            write_shard(Path(directory) / f"s-{number}.h5", {"y": samples}, rows, chunk)
        source = Shards(f"{directory}/*.h5", window)
        catalogue = source.scan()
        seen = []
        course = [PeerPartition(total, 1, batch, peers, peer) for peer in range(peers)]
        seen += walk(source, catalogue, seed, course, stop)
        state = json.loads(json.dumps(course[0].state()))
        course = [PeerPartition(total, 1, batch, new_peers, peer) for peer in range(new_peers)]
        for shares in course:
            shares.restore(state)
        seen += walk(source, catalogue, seed, course, 10**6)
        left_out = course[0].num_left_out
    assert len(seen) == len(set(seen)) == total - left_out
    assert left_out < max(peers, new_peers)


def walk(source, catalogue, seed, course, num_steps):
    """The samples of all peers over so many steps."""
    seen = []
    for shares in course:
        with source.reader(catalogue, seed) as reader:
            for _ in range(num_steps):
                if (turn := shares.next()) is None:
                    break
                if (following := shares.peek()) is not None:
                    reader.prefetch(*following.lease[:3])
                seen += reader.batch(*turn.lease[:3])["y"].tolist()
    return seen


NUM_CHUNKS, CHUNK = 24, 8
SAMPLES = NUM_CHUNKS * CHUNK


def test_former_neighbours_come_a_third_of_a_window_apart():
    """Two samples of one chunk lie at two different uniform positions of their window of S samples, so (S + 1) / 3
    apart in the mean; a shuffle of all n puts them (n + 1) / 3 apart. So the figure of quality is window / dataset.

    |i - j| has the variance (S + 1) (S - 2) / 18; the mean over independent seeds keeps within 4 standard errors.
    """
    num_seeds = 800
    for window in (1, 2, 6, NUM_CHUNKS):
        size = window * CHUNK
        distances = []
        for seed in range(num_seeds):
            order = Order(chunk_sizes([(SAMPLES, CHUNK)]), window, seed)
            positions = np.argsort(order.samples(0, 0, SAMPLES))
            distances.append(abs(positions[0] - positions[1]))
        error = math.sqrt((size + 1) * (size - 2) / 18 / num_seeds)
        assert abs(np.mean(distances) - (size + 1) / 3) < 4 * error


def test_where_a_sample_comes_does_not_depend_on_where_it_lies():
    """Chunks are placed uniformly, so position in the epoch and in the files are uncorrelated for any window: over
    independent seeds the correlation's mean is 0 and its variance at most that of the chunks alone, 1 / (C - 1).
    """
    num_seeds = 300
    for window in (1, 6, NUM_CHUNKS):
        found = []
        for seed in range(num_seeds):
            order = Order(chunk_sizes([(SAMPLES, CHUNK)]), window, seed)
            found.append(np.corrcoef(np.arange(SAMPLES), order.samples(0, 0, SAMPLES))[0, 1])
        assert abs(np.mean(found)) < 4 / math.sqrt((NUM_CHUNKS - 1) * num_seeds)


def test_a_batch_holds_as_many_chunks_as_draws_without_replacement_would():
    """b samples of a window of W chunks with c each come from W (1 - C(S - c, b) / C(S, b)) different chunks in the
    mean (S = W c), exactly; the count of one batch varies by less than sqrt(W) / 2.
    """
    window, batch, num_seeds = 6, 10, 1000
    size = window * CHUNK
    expected = window * (1 - math.comb(size - CHUNK, batch) / math.comb(size, batch))
    found = []
    for seed in range(num_seeds):
        chunks, _ = Order(chunk_sizes([(SAMPLES, CHUNK)]), window, seed).epoch(0).locate(0, batch)
        found.append(len(set(chunks.tolist())))
    assert abs(np.mean(found) - expected) < 4 * math.sqrt(window) / 2 / math.sqrt(num_seeds)
