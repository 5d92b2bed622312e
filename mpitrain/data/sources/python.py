"""Python objects as sources: arrays by name, a map-style dataset, any iterable, and `module:function` that makes one.

A sample is a dict of values by name, a named tuple, a pair (packed as x and y), or one value (packed as x). Text and
bytes are variable by nature, other values where they are declared so.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.data.datasets.named_columns import refuse_arrays
from mpitrain.data.format.columns import (
    Columns,
    Ragged,
    as_sample,
    check_columns,
    columns_of,
    sample_bytes,
)
from mpitrain.data.read.order import IntArray
from mpitrain.data.sources.base import ArraySource, Source, content_digest
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import at_home
from mpitrain.system.files.user_module import run_file

STREAM_BATCH = 64


class Stream:
    """Samples that come one after the other, once: no order but theirs, and no restart."""

    def __init__(self, samples: Iterable[object], name: str, variable: Collection[str]):
        self.name, self._samples, self._variable = name, samples, variable
        self.chosen: Mapping[str, Any] = {}

    def batches(self) -> Iterator[tuple[int, Columns]]:
        """(number of the first sample, samples) a few at a time."""
        samples, first = iter(self._samples), 0
        while items := list(islice(samples, STREAM_BATCH)):
            numbers = range(first, first + len(items))
            yield first, collate(list(zip(numbers, items)), self._variable, self.name)
            first += len(items)


class DatasetSource(Source):
    """A map-style dataset: whatever has a length and answers `dataset[i]`.

    Its fingerprint is its length and up to 64 of its samples, so each must be the same whenever it is asked for.
    """

    def __init__(self, dataset: Any, name: str, variable: Collection[str]):
        self._dataset, self.name, self._variable = dataset, name, variable
        self.num_samples = len(dataset)
        if not self.num_samples:
            raise DataError(f"{name}: holds no samples")
        self._probe = self.probe()
        self.sample_bytes = sample_bytes(self._probe)

    def take(self, rows: IntArray) -> Columns:
        return collate([(row, self._dataset[row]) for row in rows.tolist()], self._variable, self.name)

    def fingerprint(self) -> str:
        return content_digest(self._probe)

    def facts(self) -> dict[str, Any]:
        return {"samples": self.num_samples}


def collate(items: Sequence[tuple[int, object]], variable: Collection[str], where: str) -> Columns:
    """Numbered samples as columns.

    Raises:
        DataError: a sample is unlike the first; names `where`, its number and the array.
    """
    samples = [(number, _by_name(item)) for number, item in items]
    _, first = samples[0]
    columns: Columns = {}
    for number, sample in samples:
        if set(sample) != set(first):
            found, expected = ", ".join(map(str, sample)), ", ".join(map(str, first))
            raise DataError(f"{where}, sample {number}: has the arrays {found}, expected {expected}")
    for name in sorted(first):
        ragged = name in variable or isinstance(first[name], str | bytes | bytearray)
        values = [as_sample(sample[name]) for _, sample in samples]
        like = values[0]
        for (number, _), value in zip(samples, values):
            if ragged and value.ndim == 0:
                raise DataError(
                    f"{where}, sample {number}: {name!r} is variable, expected an array, not a number"
                )
            start = 1 if ragged else 0
            if value.dtype != like.dtype or value.shape[start:] != like.shape[start:]:
                raise DataError(
                    f"{where}, sample {number}: array {name!r} is {value.dtype}{list(value.shape)}, expected"
                    f" {like.dtype}{list(like.shape)} as before; convert it, or if its samples differ in length"
                    f" declare it: variable=({name!r},)"
                )
        columns[name] = Ragged.of(values) if ragged else np.stack(values)
    check_columns(columns, f"{where}, sample {samples[0][0]}")
    return columns


def _by_name(item: object) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=True))
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    return {"x": item}


def as_source(samples: object, name: str, variable: Collection[str] = ()) -> Source | Stream:
    """A source made of what Python has.

    Args:
        samples: a `Source`; arrays by name, samples on axis 0; a map-style dataset; any iterable of samples.
    Raises:
        DataError: arrays that are no samples. UsageError: none of these.
    """
    if isinstance(samples, Source | Stream):
        return samples
    refuse_arrays(samples, name)
    if isinstance(samples, Mapping):
        return ArraySource(columns_of(samples, variable, name), name)
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not isinstance(samples, str):
        return DatasetSource(samples, name, variable)
    if isinstance(samples, Iterable) and not isinstance(samples, str | bytes):
        return Stream(samples, name, variable)
    raise UsageError(
        f"{name}: is {type(samples).__name__}; give arrays by name, a dataset with a length, or an iterable of samples"
    )


def looks_like_python(text: str) -> bool:
    """Whether a source's name is `module:function` or `file.py:function`."""
    place, colon, function = text.rpartition(":")
    dotted = all(word.isidentifier() for word in place.split("."))
    return bool(colon) and function.isidentifier() and (dotted or place.endswith(".py"))


def python_source(text: str, variable: Collection[str]) -> Source | Stream:
    """What `module:function` or `file.py:function` returns when called without arguments (or is, if not callable)."""
    return as_source(python_value(text), text, variable)


def python_value(text: str) -> Any:
    """What is called so in a module or file; of a function what it returns."""
    place, _, name = text.rpartition(":")
    module = _load(place)
    if not hasattr(module, name):
        raise UsageError(f"{text}: {place} has no {name!r}")
    made = getattr(module, name)
    return made() if callable(made) else made


def _load(place: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"{place}: cannot be imported ({error})") from error
    path = at_home(place)
    if not path.is_file():
        raise UsageError(f"{path}: no such file (looked in {Path.cwd()})")
    return SimpleNamespace(**run_file(path))
