"""Laws of what reading is made of: random numbers of samples, room in the cache, and what the thread reads ahead."""

import random
import threading

import numpy as np
import pytest
import torch

from mpitrain.data import Shards
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.chunk_cache import ChunkCache, memory_needed, slots_for
from mpitrain.data.read.prefetch import ReadAhead
from mpitrain.data.read.ragged import EntryPlaces
from mpitrain.data.read.reader import ChunkReader
from mpitrain.data.read.sample_random import (
    GET,
    TRANSFORM,
    SampleRandom,
    generator_states,
    kept_generators,
    key_of,
    philox,
    restore_generators,
    sample_seeds,
    seed_generators,
)
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.system import background
from tests.data.test_data_ragged import make, write
from tests.data.test_data_reader import pack_plain

SAMPLES = np.array([0, 7, 3, 1 << 33])


def of_samples(samples=SAMPLES, seed=5, epoch=2):
    return SampleRandom(seed, epoch, samples)


# ---- random numbers


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xA4093822, 0x299F31D0), (0x85A308D3243F6A88, 0x13198A2E, 0x03707344),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_gives_the_numbers_of_its_authors(key, counter, words, monkeypatch):
    """The known answers of Random123: of zeros, and of the digits of pi."""
    sample, draw, block = counter
    blocks = np.array([block], np.uint64)
    monkeypatch.setattr("mpitrain.data.read.sample_random.np.arange", lambda *_, **__: blocks)
    assert philox(key, np.array([sample], np.uint64), draw, 1).tolist() == [list(words)]


def test_numbers_of_a_sample_are_the_same_whoever_asks_and_others_at_every_draw():
    together, alone = of_samples(), [of_samples(SAMPLES[i : i + 1]) for i in range(len(SAMPLES))]
    assert len(together) == len(SAMPLES) and [len(one) for one in alone] == [1] * len(SAMPLES)
    seen = []
    for draw in ("uniform", "uniform", "normal"):
        rows = getattr(together, draw)(2, 3)
        assert rows.shape == (len(SAMPLES), 2, 3) and rows.dtype == torch.float32
        assert torch.equal(rows, torch.cat([getattr(one, draw)(2, 3) for one in alone]))
        seen.append(rows)
    assert all(rows.unique().numel() == rows.numel() for rows in seen)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(of_samples(seed=6).uniform(), of_samples().uniform())
    assert not torch.equal(of_samples(epoch=3).uniform(), of_samples().uniform())


def test_a_range_of_integers_is_met_from_end_to_end_and_only_moved_by_its_low():
    samples = np.arange(300)
    for low, high in ((-3, 5), (2, 3), (-9, -4), (0, 1 << 32)):
        numbers = of_samples(samples).integers(low, high, 2)
        assert numbers.dtype == torch.int64 and numbers.shape == (300, 2)
        assert torch.equal(numbers, of_samples(samples).integers(0, high - low, 2) + low)
        assert int(numbers.min()) >= low and int(numbers.max()) < high
        if high - low < 10:
            assert numbers.unique().tolist() == list(range(low, high))
    for low, high in ((3, 3), (4, 3), (0, (1 << 32) + 1)):
        with pytest.raises(ValueError, match="expected low < high"):
            of_samples().integers(low, high)


def test_uniform_numbers_fill_their_range_and_bernoulli_is_what_lies_below():
    samples = np.arange(4000)
    unit = of_samples(samples).uniform()
    assert 0 <= unit.min() < 1e-3 and 1 - 1e-3 < unit.max() < 1
    torch.testing.assert_close(of_samples(samples).uniform(low=-2.0, high=6.0), unit * 8 - 2)
    for probability in (0.0, 0.25, float(unit[17]), 1.0):  # one that is drawn lies not below itself
        assert torch.equal(of_samples(samples).bernoulli(probability), unit < probability)


def test_normal_numbers_are_normal():
    numbers = of_samples(np.arange(4000)).normal(5).double().flatten()
    moments = [float((numbers**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.1)


def test_seeds_of_samples_are_of_64_bits_and_of_seed_epoch_and_purpose():
    seeds = sample_seeds(5, 2, SAMPLES)
    assert seeds == [sample_seeds(5, 2, SAMPLES[i : i + 1])[0] for i in range(len(SAMPLES))]
    others = [
        *sample_seeds(6, 2, SAMPLES),
        *sample_seeds(5, None, SAMPLES),
        *sample_seeds(5, 0, SAMPLES),
        *seeds,
    ]
    assert len(set(others)) == len(others) and max(others) >= 1 << 62 and max(others) < 1 << 64
    assert any(seed & 0xFFFFFFFF for seed in seeds)
    keys = {key_of(5, purpose, epoch) for purpose in (TRANSFORM, GET) for epoch in (None, 0, 1)}
    assert len(keys) == 6


GENERATORS = {
    "torch": lambda: torch.rand(2),
    "numpy": lambda: torch.from_numpy(np.random.rand(2)),
    "python": lambda: torch.tensor([random.random(), random.random()]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_transform_that_draws_from_a_generator_draws_for_its_sample_alone(name):
    """And leaves the generator where it was."""
    draw = GENERATORS[name]
    numbers, before = of_samples(), generator_states()
    once = [numbers.each(lambda value: value + draw(), torch.zeros(len(SAMPLES))) for _ in range(2)]
    assert once[0].shape == (len(SAMPLES), 2) and torch.stack(once).unique().numel() == 4 * len(SAMPLES)
    alone = [of_samples(SAMPLES[i : i + 1]).each(lambda _: draw(), [0]) for i in range(len(SAMPLES))]
    assert torch.equal(once[0], torch.cat(alone))
    follows = draw()
    restore_generators(before)
    assert torch.equal(follows, draw())
    with pytest.raises(ValueError, match="zip"):
        numbers.each(lambda value: value, torch.zeros(3))


def test_generators_are_seeded_with_all_that_they_take():
    for seed in (0, 3 + (5 << 32), (1 << 64) - 1):
        with kept_generators():
            seed_generators(seed)
            drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        numpy_s = np.random.RandomState(seed & 0xFFFFFFFF)
        expected = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()]
        assert drawn == [*expected, random.Random(seed).random(), numpy_s.rand()]


def test_normal_numbers_and_seeds_are_these_functions_of_the_words():
    """As the first lines of the file say: so many bits each, in this order."""
    words = philox(key_of(5, TRANSFORM, 2), SAMPLES.astype(np.uint64), 1, 1).astype(np.float64)
    radius = np.sqrt(-2 * np.log((words[:, 0] + 1) / 2**32))
    expected = (radius * np.cos(2 * np.pi * words[:, 1] / 2**32)).astype(np.float32)
    assert of_samples().normal().tolist() == expected.tolist()
    pairs = philox(key_of(5, GET, 2), SAMPLES.astype(np.uint64), 0, 1).tolist()
    assert sample_seeds(5, 2, SAMPLES) == [low + (high << 32) for low, high, *_ in pairs]


# ---- room


def catalogue_of(tmp_path, num_samples=400, chunk=10, window=3) -> Catalogue:
    pack_plain(tmp_path, [num_samples], chunk)
    return Shards(f"{tmp_path}/*.h5", window_chunks=window).scan()


def test_a_reader_keeps_two_windows_up_to_256_mib_and_one_whatever_it_takes(tmp_path, monkeypatch):
    catalogue = catalogue_of(tmp_path)
    for chunk_bytes, slots in ((1, 8), (32 << 20, 8), (37 << 20, 6), (64 << 20, 4), (1 << 40, 4)):
        monkeypatch.setattr(Catalogue, "chunk_bytes", chunk_bytes)
        assert slots_for(catalogue) == slots
        assert memory_needed(catalogue) == slots * chunk_bytes + 64 * catalogue.window_samples + 96 * 40


def test_there_is_no_room_for_more_chunks_than_there_are(tmp_path):
    assert slots_for(catalogue_of(tmp_path, 50)) == 5


def test_entries_of_the_largest_batch_count_as_memory_whatever_comes_later(tmp_path):
    catalogue = Shards(write(tmp_path / "d", make([3, 0, 9, 1], "float32"), chunk_samples=4)).scan()
    places = EntryPlaces(catalogue, 1)
    held = places.place(0)["x"]
    held[:] = np.arange(held.size, dtype=held.dtype).reshape(held.shape)
    spans = np.array([[0, 3], [3, 3], [3, 12], [12, 13]])
    sizes = []
    for rows in ([1], [0, 2], [3, 1], [0, 1, 2, 3]):
        batch = places.gather(np.zeros(len(rows), np.int64), {"x_offsets": spans[rows]})
        expected = np.concatenate([held[slice(*span)] for span in spans[rows].tolist()])
        assert np.array_equal(batch["x"].numpy(), expected)
        sizes.append(sum(tensor.nbytes for tensor in batch.values()))
        assert places.largest_bytes == max(sizes)
    halves = [
        (np.array(numbers), places.gather(np.zeros(2, np.int64), {"x_offsets": spans[numbers]}))
        for numbers in ([3, 1], [0, 2])
    ]
    joined = places.join(halves, 4)
    assert torch.equal(joined["x"], batch["x"]) and torch.equal(joined["x_offsets"], batch["x_offsets"])


# ---- what is read ahead


def test_with_windows_of_one_chunk_no_more_than_two_are_read_ahead(tmp_path):
    catalogue = catalogue_of(tmp_path, 100, 10, window=1)
    cache = ChunkCache(catalogue, ShardFiles(catalogue))
    announced = []
    cache.announce, announce = lambda chunks: (announced.extend(chunks), announce(chunks)), cache.announce
    with ChunkReader(catalogue, 0, cache) as reader:
        reader.prefetch(0, 0, 10)
        reader.batch(0, 0, 10)
        reader._ahead.settle()
        assert cache.num_slots == 4 and cache.num_reads == 3
        nearest = {int(chunk) for window in range(3) for chunk in reader.order.epoch(0).chunks_of(window)}
        assert set(announced) <= nearest


@pytest.mark.parametrize("run", [(0, 0), (7, 0), (-10, 10), (96, 10), (100, 10), (20, -5)])
def test_a_hint_at_what_no_batch_can_be_is_nothing(tmp_path, run):
    source = Shards(f"{tmp_path}/*.h5")
    catalogue = catalogue_of(tmp_path, 100)
    with source.reader(catalogue, 0) as reader:
        reader.prefetch(0, *run)
        assert not reader._ahead.started
        reader.prefetch(0, 90, 10)
        assert reader._ahead.started


class Gate:
    """A store whose chunks come once somebody waits for them."""

    num_slots, sample_bytes = 8, 1

    def __init__(self):
        self.loaded, self.awaited = [], threading.Event()

    def holds(self, chunks):
        return set(chunks.tolist()) <= set(self.loaded)

    def announce(self, chunks):
        pass

    def load(self, chunk):
        assert self.awaited.wait(30)
        self.loaded.append(chunk)


def test_who_waits_for_chunks_goes_on_when_all_of_them_are_here_and_they_come_first():
    """Of those that the thread is about to read."""
    for wanted in ([5], [6, 2, 6], [0, 7]):
        store = Gate()
        ahead = ReadAhead(store)
        wait_for = ahead._arrival.wait_for
        ahead._arrival.wait_for = lambda over, wait_for=wait_for, store=store: (
            store.awaited.set(),
            wait_for(over),
        )
        ahead.follow(range(8))
        ahead.wait_for(np.array(wanted))
        assert set(wanted) <= set(store.loaded)
        ahead.settle()
        assert sorted(store.loaded) == list(range(8))
        assert set(store.loaded[: len(set(wanted)) + 1]) >= set(wanted)  # one may have been under way
        ahead.wait_for(np.array([9]))  # that nobody reads
        ahead.close()


def test_what_is_done_between_chunks_comes_after_the_near_ones_and_before_those_beyond():
    store = Gate()
    store.awaited.set()
    ahead = ReadAhead(store)
    for beyond in ([], [3, 4]):
        store.loaded.clear()
        ahead.follow(range(3), lambda: store.loaded.append("then"), beyond)
        ahead.settle()
        assert store.loaded == [0, 1, 2, "then", *beyond]
    ahead.close()


def test_who_waits_for_a_thread_that_has_failed_is_told():
    """Not of the failure of one chunk, which whoever needs it meets: of the thread's own."""
    failures = []

    class Ended(BaseException):
        pass

    def fail():
        raise Ended

    with background.failures_to(failures.append):
        ahead = ReadAhead(Gate())
        ahead.follow([], fail)
        for wait in (ahead.settle, lambda: ahead.wait_for(np.array([3]))):
            with pytest.raises(RuntimeError, match="reads ahead has ended"):
                wait()
        ahead.close()
    assert [type(one) for one in failures] == [Ended]
