"""Random numbers of samples: each belongs to one sample of one epoch, whichever rank, batch or process asks for it.

Invariants: what is drawn for a sample is a function of (seed, epoch, sample, number of the draw, shape) alone. Numbers
are those of Philox4x32-10 (Salmon et al., 2011) with the sample in the counter, so a batch is drawn at once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.format.columns import IntArray
from mpitrain.system.draws import LOCK

Words = NDArray[np.uint64]  # numbers below 2^32
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
TRANSFORM, GET = 4, 5  # the second word of a key: what the numbers are for; `order.py` has those below
IN_FILE_ORDER = 0  # in place of an epoch, which counts from 1 here


class SampleRandom:
    """Random numbers for the samples of a batch: row i of what a method returns is of sample i.

    Every call draws anew; call in the same order in every batch.
    """

    def __init__(self, seed: int, epoch: int | None, samples: IntArray):
        self._key = key_of(seed, TRANSFORM, epoch)
        self._samples, self._draw = samples.astype(np.uint64), 0

    def __len__(self) -> int:
        return len(self._samples)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """float32 in [low, high), of shape (samples, *shape)."""
        unit = (self._words(shape) >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(unit) * (high - low) + low

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, standard normal (Box and Muller), of shape (samples, *shape)."""
        words = self._words((*shape, 2))
        radius = np.sqrt(-2.0 * np.log((words[..., 0].astype(np.float64) + 1.0) * 2.0**-32))
        angle = 2.0 * np.pi * 2.0**-32 * words[..., 1].astype(np.float64)
        return torch.from_numpy((radius * np.cos(angle)).astype(np.float32))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high), of shape (samples, *shape); the range is at most 2^32."""
        if not 0 < high - low <= 1 << 32:
            raise ValueError(f"integers: expected low < high <= low + 2^32, got {low} and {high}")
        scaled = (self._words(shape) * np.uint64(high - low)) >> HALF
        return torch.from_numpy(scaled.astype(np.int64) + low)

    def bernoulli(self, probability: float, *shape: int) -> torch.Tensor:
        """bool, True with this probability, of shape (samples, *shape)."""
        return self.uniform(*shape) < probability

    def each(self, function: Callable[[Any], Any], values: Iterable[Any]) -> torch.Tensor:
        """`function` of every sample's value, stacked: for transforms that draw from torch's, numpy's or Python's
        own generators, which are seeded for the sample meanwhile."""
        seeds = self._seeds()
        with kept_generators():
            results = []
            for seed, value in zip(seeds, values, strict=True):
                seed_generators(seed)
                results.append(function(value))
        return torch.stack(results)

    def _seeds(self) -> list[int]:
        words = self._words((2,))
        seeds: list[int] = (words[:, 0] | words[:, 1] << HALF).tolist()
        return seeds

    def _words(self, shape: tuple[int, ...]) -> Words:
        self._draw += 1
        count = int(np.prod(shape, dtype=np.int64))
        words = philox(self._key, self._samples, self._draw, -(-count // 4))
        return words[:, :count].reshape(len(self._samples), *shape)


def key_of(seed: int, purpose: int, epoch: int | None) -> tuple[int, int]:
    """The key of an epoch's numbers; None is the order of the files."""
    number = IN_FILE_ORDER if epoch is None else epoch + 1
    first, second = np.random.SeedSequence((seed, purpose, number)).generate_state(2, np.uint32).tolist()
    return first, second


def sample_seeds(seed: int, epoch: int | None, samples: IntArray) -> list[int]:
    """A seed of 64 bits for each sample: of what a dataset draws while it makes it."""
    words = philox(key_of(seed, GET, epoch), samples.astype(np.uint64), 0, 1)
    seeds: list[int] = (words[:, 0] | words[:, 1] << HALF).tolist()
    return seeds


def philox(key: tuple[int, int], samples: Words, draw: int, num_blocks: int) -> Words:
    """Four words a block, of shape (samples, 4 * num_blocks): Philox4x32-10 of (sample, draw, block)."""
    shape = (len(samples), num_blocks)
    first = np.broadcast_to((samples & LOW)[:, None], shape)
    second = np.broadcast_to((samples >> HALF)[:, None], shape)
    third = np.full(shape, draw, np.uint64)
    fourth = np.broadcast_to(np.arange(num_blocks, dtype=np.uint64), shape)
    left, right = key
    for _ in range(10):
        high, low = MULTIPLIERS[0] * first, MULTIPLIERS[1] * third
        first, second = (low >> HALF) ^ second ^ np.uint64(left), low & LOW
        third, fourth = (high >> HALF) ^ fourth ^ np.uint64(right), high & LOW
        left, right = (left + WEYL[0]) & 0xFFFFFFFF, (right + WEYL[1]) & 0xFFFFFFFF
    return np.stack([first, second, third, fourth], axis=-1).reshape(len(samples), 4 * num_blocks)


def seed_generators(seed: int) -> None:
    """Seed the generators that datasets draw from: torch's on the CPU, numpy's old one and Python's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore afterwards what they were, so that the training draws as if nothing had been drawn meanwhile."""
    with LOCK:  # they are those of all threads
        states = generator_states()
        try:
            yield
        finally:
            restore_generators(states)


def generator_states() -> tuple[Any, ...]:
    """Where the generators are."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore_generators(states: tuple[Any, ...]) -> None:
    """Put them back there."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
