"""A torch dataset as a source: by index where it has one, in its own order where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mpitrain.data.datasets.named_columns import NamedColumns
from mpitrain.data.datasets.samples import Samples
from mpitrain.data.datasets.streams import Stream
from mpitrain.data.read.reader import Source
from mpitrain.errors import UsageError


def is_source(value: object) -> bool:
    """Whether it can be read as it is."""
    return hasattr(value, "scan") and hasattr(value, "reader") and not isinstance(value, type)


def is_map_style(value: object) -> bool:
    """Whether it has samples by index, as torch's map-style datasets have."""
    plain = isinstance(value, str | bytes | Mapping | DataLoader | type)
    return not plain and hasattr(value, "__getitem__") and not isinstance(value, IterableDataset)


def as_source(value: Any, **options: Any) -> Source | None:
    """`value` as a source, with the options of a loader; None where it is none."""
    if is_source(value):
        source: Source = value
        return source
    if isinstance(value, IterableDataset):
        return Stream(value, **options)
    if isinstance(value, Mapping):
        return Samples(NamedColumns(value), **options)
    return Samples(value, **options) if is_map_style(value) else None


def checked_source(value: object, owner: str) -> Source:
    """`value` as a source.

    Raises:
        UsageError: it is none.
    """
    source = as_source(value)
    if source is None:
        raise UsageError(
            f"{owner}: expected mpitrain.Shards(...), mpitrain.Synthetic(...) or a torch dataset, got "
            f"{type(value).__name__}"
        )
    return source
