"""HDF5's own read, without Python's lock: h5py holds it while HDF5 copies and sums up, so that nothing else runs.

Invariants: h5py's lock is held, so HDF5 is entered by one thread at a time; whatever is not right is left to h5py,
which raises what it is. Where the library's function is not found, h5py reads.
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
def _function() -> Any:
    """`H5Dread` of the library that h5py uses; None where it is not found, or identifiers are of another kind."""
    if h5py.version.hdf5_version_tuple < (1, 10, 0):
        return None
    try:
        function = ctypes.CDLL(h5d.__file__).H5Dread
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [_HID] * 5 + [ctypes.c_void_p], ctypes.c_int
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
    function = _function()
    if function is not None and into.flags.c_contiguous and into.flags.writeable:
        with phil:
            if not hasattr(_silent, "yes"):
                with contextlib.suppress(AttributeError):
                    _errors.silence_errors()
                _silent.yes = True
            if function(dataset.id, kind.id, memory.id, space.id, 0, into.ctypes.data) >= 0:
                return
    dataset.read(memory, space, into, kind)
