"""Where packed samples come from: a name or a file becomes a dict of numpy arrays.

Law of this file: a source is read whole, deterministically, and without executing anything from it (no
pickle). Add a source: one function and one line in `load_source`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.catalogue import ITEM_BYTES
from mpitrain.errors import DataError, UsageError

Arrays = dict[str, NDArray[np.generic]]


def load_source(source: str) -> Arrays:
    """Arrays of a source, all with the same number of samples on axis 0.

    Args:
        source: `digits` (scikit-learn's 1,797 handwritten digits: x float32 (1, 8, 8) in [0, 1], y int64),
            `topics` (the text that ships with Python: text uint8 (65,), ASCII) or the path of a .npz file.
    Raises:
        UsageError: no such source. DataError: its arrays are no samples.
    """
    if source == "digits":
        return _digits()
    if source == "topics":
        return _topics()
    if source.endswith(".npz"):
        return _npz(Path(source).expanduser())
    raise UsageError(f"unknown source {source!r}: give `digits`, `topics` or the path of a .npz file")


def _digits() -> Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"`digits` ships with scikit-learn, which is not here ({error}): pip install 'mpitrain[data]'"
        ) from error
    digits = load_digits()
    return {"x": (digits.images / 16).astype(np.float32)[:, None], "y": digits.target.astype(np.int64)}


def _topics() -> Arrays:
    """What `help()` prints about the language, cut into runs of 64 characters and the one that follows."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8)
    num_samples = (len(characters) - 1) // 64
    starts = 64 * np.arange(num_samples)[:, None]
    return {"text": characters[starts + np.arange(65)]}


def _npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in sorted(file.files)}
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{path}: cannot be read as .npz ({error}); write it with numpy.savez(path, x=..., y=...)"
        ) from error
    check_arrays(arrays, str(path))
    return arrays


def check_arrays(arrays: Mapping[str, NDArray[np.generic]], source: str) -> None:
    """Refuse arrays that are not samples.

    Raises:
        DataError: none at all, no sample axis, different lengths, or a dtype that no tensor holds; names
            source and array.
    """
    if not arrays:
        raise DataError(f"{source}: holds no arrays; expected some such as x and y")
    for name, array in arrays.items():
        if not name.isidentifier():
            raise DataError(
                f"{source}: array {name!r} is no plain name; use letters, digits and underscores, such as x"
            )
        if array.dtype.name not in ITEM_BYTES:
            raise DataError(
                f"{source}: array {name!r} has dtype {array.dtype}, which no tensor holds; store numbers"
            )
        if array.ndim == 0 or 0 in array.shape:
            raise DataError(
                f"{source}: array {name!r} has shape {array.shape}, expected (samples, ...) with nothing zero"
            )
    if len({len(array) for array in arrays.values()}) != 1:
        found = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DataError(f"{source}: its arrays differ in length: {found}; each needs one entry per sample")
