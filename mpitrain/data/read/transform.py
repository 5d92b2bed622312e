"""A function of the user's on every batch, with random numbers that belong to the samples.

Invariants: what a transform makes of a sample is a function of (seed, epoch, sample) alone, if it draws from the
numbers it is given; it is called once for every batch, by the thread or process that hands the batch out, and torch's,
numpy's and Python's generators are afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.ragged import num_samples_in
from mpitrain.data.read.sample_random import SampleRandom, kept_generators, sample_seeds, seed_generators
from mpitrain.errors import DataError

Batch = dict[str, torch.Tensor]
Transform = Callable[[Batch, SampleRandom], Any]


def transformed(
    transforms: Sequence[Transform], batch: Batch, seed: int, epoch: int | None, keys: IntArray
) -> Batch:
    """What the transforms, one after the other, make of a batch.

    Raises:
        DataError: one returns no batch of as many samples.
    """
    with kept_generators():
        for transform in transforms:
            if len(
                keys
            ):  # so that a transform that draws elsewhere depends on the batch and on nothing before it
                seed_generators(sample_seeds(seed, epoch, keys[:1])[0])
            batch = _checked(transform(batch, SampleRandom(seed, epoch, keys)), len(keys), transform)
    return batch


def _checked(returned: Any, num_samples: int, transform: Transform) -> Batch:
    name = getattr(transform, "__name__", type(transform).__name__)
    batch: Batch = returned
    if (
        not isinstance(batch, dict)
        or not batch
        or not all(isinstance(one, torch.Tensor) for one in batch.values())
    ):
        raise DataError(
            f"transform {name} must return the batch, a dict of tensors by name, got {type(batch).__name__}"
        )
    if num_samples_in(batch) != num_samples:
        raise DataError(
            f"transform {name} was given {num_samples} samples and has returned {num_samples_in(batch)}; it may change "
            "samples, not leave some out"
        )
    return batch
