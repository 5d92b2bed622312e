"""Arrays of one length as a dataset of named columns, and the refusal of arrays that look like one but are none.

A tuple `(X, Y)` has a length and answers `[i]`, so it would count as a dataset of two samples, X and Y.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain.errors import UsageError

FEW = 8  # arrays of one length in a list; so few samples are hardly a dataset


class NamedColumns:
    """A map-style dataset: sample i has the i-th entry of each array, by the array's name.

    Raises:
        UsageError: a column is no array of numbers, or they differ in length; names it.
    """

    def __init__(self, columns: Mapping[Any, object]):
        self.columns = {_name(name): _column(name, value) for name, value in columns.items()}
        if not self.columns:
            raise UsageError(
                "data: an empty dict holds no samples; give arrays by name, such as {'x': X, 'y': Y}"
            )
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise UsageError(f"data: the arrays of a dict are columns of one length: {found}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise UsageError(f"data: the columns of a dict have names, got {name!r}; write it as text")
    return name


def _column(name: object, value: object) -> Any:
    if hasattr(value, "detach"):  # a tensor
        column: Any = value
    else:
        try:
            plain = isinstance(value, list | tuple | range) or hasattr(value, "__array__")
            column = np.asarray(value if plain else None)
        except (ValueError, TypeError):  # of rows that differ in length
            column = np.empty(0, object)
        if column.dtype.kind not in "biufc":
            raise UsageError(
                f"data: column {name!r} is {type(value).__name__}, which makes no array of numbers; give arrays of one "
                "length by name, or a dataset"
            )
        column = column.astype(column.dtype.newbyteorder("="), copy=False)
    if not column.ndim:
        raise UsageError(f"data: column {name!r} is a single value; give one for each sample")
    return column


def refuse_arrays(value: object, owner: str) -> None:
    """Refuse a tuple, or a short list, of arrays of one length.

    Raises:
        UsageError: says what to write.
    """
    if not isinstance(value, tuple | list) or hasattr(value, "_fields") or not value:
        return
    lengths = {len(one) if _is_array(one) else -1 for one in value}
    if len(lengths) != 1 or -1 in lengths or (isinstance(value, list) and len(value) > FEW):
        return
    names = ", ".join(
        "XY"[number] if len(value) == 2 else f"X{number}" for number in range(min(3, len(value)))
    )
    more = ", ..." if len(value) > 3 else ""
    raise UsageError(
        f"{owner}: a {type(value).__name__} of {len(value)} arrays of {lengths.pop()} entries would be a dataset of "
        f"{len(value)} samples; write torch.utils.data.TensorDataset({names}{more}), or give the arrays by name: "
        "{'x': X, 'y': Y}"
    )


def _is_array(one: object) -> bool:
    if isinstance(one, list):
        return len(one) > 0 and isinstance(one[0], int | float | list)
    return hasattr(one, "shape") and hasattr(one, "dtype") and len(one.shape) > 0
