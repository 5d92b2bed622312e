"""A function of the user's on every batch, with random numbers that belong to the samples.

Invariants: what a transform makes of a sample is a function of (seed, epoch, sample) alone, if it draws from the
numbers it is given; it is called once for every batch, by the thread or process that hands the batch out, and torch's,
numpy's and Python's generators are afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batch import Batch, as_batch, num_samples_in
from mpitrain.data.read.batch_mistakes import explaining
from mpitrain.data.read.sample_random import SampleRandom, kept_generators, sample_seeds, seed_generators
from mpitrain.errors import DataError

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
            with explaining(f"transform {_name(transform)}", batch, DataError):
                returned = transform(batch, SampleRandom(seed, epoch, keys))
            batch = _checked(returned, len(keys), transform)
    return batch


def _checked(returned: Any, num_samples: int, transform: Transform) -> Batch:
    name = _name(transform)
    if returned is None or isinstance(returned, str | bytes | int | float):
        raise DataError(
            f"transform {name} must return the batch, such as a dict of tensors by name or a tuple of them, got "
            f"{type(returned).__name__}"
        )
    try:
        batch = as_batch(returned)
    except DataError as error:
        raise DataError(f"transform {name} has returned {error}") from None
    if (found := num_samples_in(batch)) not in (None, num_samples):
        raise DataError(
            f"transform {name} was given {num_samples} samples and has returned {found}; it may change samples, not "
            "leave some out"
        )
    return batch


def _name(transform: Transform) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
