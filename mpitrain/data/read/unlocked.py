"""HDF5's own functions, without Python's lock: h5py holds it while HDF5 copies and sums up, so that nothing else runs.

Invariants: h5py's lock is held where a file is read, so HDF5 is entered by one thread at a time; whatever is not right
is left to h5py, which raises what it is. Where the library's function is not found, h5py reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import Any

import h5py
import numpy as np
from h5py import _errors, h5d, h5s, h5t
from h5py._objects import phil
from numpy.typing import NDArray

_HID = ctypes.c_int64
_silent = threading.local()


@functools.cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the library that h5py uses; None where it is not found, or identifiers are of another kind."""
    if h5py.version.hdf5_version_tuple < (1, 10, 0):
        return None
    try:
        function = ctypes.CDLL(h5d.__file__)[name]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = arguments, result
    return function


def read(
    dataset: h5d.DatasetID,
    memory: h5s.SpaceID,
    space: h5s.SpaceID,
    into: NDArray[np.generic],
    kind: h5t.TypeID,
) -> None:
    """Read the selection `space` of a dataset into `into`, which is contiguous and has room for `memory`.

    Raises:
        OSError, RuntimeError: from h5py.
    """
    function = _function("H5Dread", ctypes.c_int, *[_HID] * 5, ctypes.c_void_p)
    if function is not None and into.flags.c_contiguous and into.flags.writeable:
        with phil:
            if not hasattr(_silent, "yes"):
                with contextlib.suppress(AttributeError):
                    _errors.silence_errors()
                _silent.yes = True
            if function(dataset.id, kind.id, memory.id, space.id, 0, into.ctypes.data) >= 0:
                return
    dataset.read(memory, space, into, kind)


def fletcher32(data: bytes, length: int) -> int | None:
    """HDF5's sum of the first `length` bytes of `data`; None where the library's function is not found."""
    function = _function("H5_checksum_fletcher32", ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t)
    return None if function is None else int(function(data, length))


def inflate(data: bytes, length: int, into: NDArray[np.uint8]) -> bool:
    """Whether the first `length` bytes of `data` are a whole stream of gzip that fills `into`, which is contiguous, and
    no more; by the zlib that HDF5 uses. False where it is not found."""
    size = ctypes.c_ulong(into.nbytes)
    function = _function(
        "uncompress",
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_ulong),
        ctypes.c_char_p,
        ctypes.c_ulong,
    )
    is_whole = function is not None and function(into.ctypes.data, size, data, length) == 0
    return is_whole and size.value == into.nbytes
