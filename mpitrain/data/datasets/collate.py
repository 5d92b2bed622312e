"""From samples to a batch: a dict of tensors with one row for each sample.

A sample is a dict of values by name, a named tuple, a pair (`x` and `y`), or one value (`x`); what a `collate_fn`
returns is named in the same way.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from mpitrain.data.read.ragged import num_samples_in
from mpitrain.errors import DataError

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[Any]], Any]


def collate(samples: list[Any], numbers: Sequence[int], collate_fn: Collate | None, name: str) -> Batch:
    """A batch of samples with these numbers.

    Raises:
        DataError: they are unlike each other, or make no batch; names the dataset and the sample.
    """
    try:
        made = collate_fn(samples) if collate_fn else default_collate([by_name(one) for one in samples])
    except Exception as error:
        if collate_fn is None:
            _check_alike(samples, numbers, name)
        which = f"samples {_listed(numbers)}"
        raise DataError(f"{name}: {which} make no batch: {describe(error)}") from error
    batch = {key: _tensor(value, key, name) for key, value in by_name(made).items()}
    if not batch:
        raise DataError(f"{name}: collate_fn has made an empty batch of samples {_listed(numbers)}")
    if (found := _num_rows(batch)) != len(samples):
        raise DataError(
            f"{name}: collate_fn has made a batch of {found} rows from {len(samples)} samples ({_listed(numbers)}); it "
            "must have a row for each, on the first axis"
        )
    return batch


def by_name(item: object) -> dict[str, Any]:
    """The values of a sample or a batch by name."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=True))
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    if isinstance(item, tuple | list) and len(item) == 1:
        return {"x": item[0]}
    if isinstance(item, tuple | list):
        raise DataError(
            f"a sample or batch of {len(item)} values has no names: return a dict, such as "
            '{"x": image, "mask": mask, "y": label}'
        )
    return {"x": item}


def describe(error: BaseException) -> str:
    """An error of the user's code on one line, with the place where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _tensor(value: object, key: object, name: str) -> torch.Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor) or not isinstance(key, str):
        raise DataError(
            f"{name}: {key!r} of a batch is {type(value).__name__}, expected a tensor under a name; a collate_fn makes "
            "numbers of text and other objects"
        )
    return value


def _num_rows(batch: Batch) -> int:
    first = next(iter(batch.values()))
    return num_samples_in(batch) if first.dim() else -1


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
