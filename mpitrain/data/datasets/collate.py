"""From samples to a batch: what torch's `default_collate` or the user's `collate_fn` makes of them.

A sample that is a tuple gives a tuple (torch makes a list of it), and one of one or two values answers by name, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from mpitrain.data.read.batch import NAMES, Batch, as_batch, num_samples_in, only_tensors, values_of
from mpitrain.errors import DataError

Collate = Callable[[list[Any]], Any]


def collate(samples: list[Any], numbers: Sequence[int], collate_fn: Collate | None, name: str) -> Batch:
    """A batch of samples with these numbers.

    Raises:
        DataError: they are unlike each other, or make no batch; names the dataset and the sample.
    """
    try:
        made = collate_fn(samples) if collate_fn else _together(samples)
    except Exception as error:
        if collate_fn is None:
            _check_alike(samples, numbers, name)
        which = f"samples {_listed(numbers)}"
        raise DataError(f"{name}: {which} make no batch: {describe(error)}") from error
    try:
        batch = as_batch(made)
    except DataError as error:
        raise DataError(f"{name}: of samples {_listed(numbers)} was made {error}") from None
    if collate_fn is None and not only_tensors(batch):
        _check_alike(samples, numbers, name)
    if (found := num_samples_in(batch)) not in (None, len(samples)):
        raise DataError(
            f"{name}: collate_fn has made a batch of {found} rows from {len(samples)} samples ({_listed(numbers)}); it "
            "must have a row for each, on the first axis"
        )
    return batch


def _together(samples: list[Any]) -> Any:
    first = samples[0]
    if any(isinstance(one, Mapping) != isinstance(first, Mapping) for one in samples):
        raise TypeError("some are dicts and some are not")
    made = default_collate(samples)
    return tuple(made) if type(first) is tuple else made


def by_name(sample: object) -> dict[str, Any]:
    """The values of a sample, by the names that the batch gives them."""
    plain = type(sample) in (tuple, list) and len(sample) <= len(NAMES)  # type: ignore[arg-type]
    return dict(zip(NAMES, sample, strict=False)) if plain else values_of(sample)  # type: ignore[call-overload]


def describe(error: BaseException) -> str:
    """An error of the user's code on one line, with the place where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _check_alike(samples: list[Any], numbers: Sequence[int], name: str) -> None:
    """Name the first sample that is unlike the first one."""
    first = by_name(samples[0])
    for number, sample in zip(numbers, samples):
        named = by_name(sample)
        if set(named) != set(first):
            found, expected = ", ".join(map(str, named)), ", ".join(map(str, first))
            raise DataError(
                f"{name}: sample {number} has {found}, expected {expected} as sample {numbers[0]}"
            )
        for key, value in named.items():
            here, there = _shape(value), _shape(first[key])
            if here != there:
                raise DataError(
                    f"{name}: {key!r} of sample {number} is {here}, expected {there} as of sample {numbers[0]}; make "
                    "them alike, or give a collate_fn (mpitrain.Samples(dataset, collate_fn=...)) that pads them"
                )


def _shape(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
