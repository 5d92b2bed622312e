"""Compression of chunks by name: which HDF5 filters write it, and what a dataset was written with.

Invariants: gzip needs nothing but HDF5; the others come from the package hdf5plugin, which is imported
only where a name or a file asks for it. Before compression the bytes of equal significance are put together (shuffle),
and every chunk carries its fletcher32 sum, compressed or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import h5py
from h5py import h5z

from mpitrain.errors import DataError, UsageError

LEVELS = {"gzip": (1, 9, 4), "zstd": (1, 22, 3), "blosc": (1, 9, 5)}  # name -> lowest, highest, default
FILTER_NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 32000: "lzf"}
FILTER_NAMES |= {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}
FIRST_REGISTERED = 32000  # below it filters are HDF5's own, which no plugin brings
INSTALL = "pip install 'mpitrain[compression]'"


@dataclass(frozen=True)
class Compression:
    """How chunks are compressed: `name` (gzip, zstd or blosc) and `level` (higher is smaller and slower)."""

    name: str
    level: int

    @classmethod
    def parse(cls, text: str | None) -> Compression | None:
        """From `NAME` or `NAME:LEVEL`; None for None or "none".

        Raises:
            UsageError: an unknown name or level; a name that needs hdf5plugin, which is not here.
        """
        if text is None or text == "none":
            return None
        name, _, level = text.partition(":")
        if name not in LEVELS:
            raise UsageError(f"--compression {text!r}: expected none, {', '.join(LEVELS)}, or such as gzip:4")
        lowest, highest, usual = LEVELS[name]
        if level and not (level.isdigit() and lowest <= int(level) <= highest):
            raise UsageError(f"--compression {text!r}: the level of {name} is {lowest} to {highest}")
        if name != "gzip":
            _plugin(f"--compression {name}")
        return cls(name, int(level) if level else usual)

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"

    def options(self, item_bytes: int) -> dict[str, Any]:
        """Arguments of h5py's `create_dataset` for values of so many bytes."""
        shuffle = {"shuffle": True} if item_bytes > 1 else {}
        if self.name == "gzip":
            return shuffle | {"compression": "gzip", "compression_opts": self.level}
        plugin = _plugin(f"--compression {self.name}")
        if self.name == "zstd":
            return shuffle | dict(plugin.Zstd(clevel=self.level))
        return dict(plugin.Blosc(cname="lz4", clevel=self.level, shuffle=plugin.Blosc.SHUFFLE))


def _plugin(asked_by: str) -> Any:
    try:
        import hdf5plugin
    except ImportError as error:
        raise UsageError(f"{asked_by} needs the package hdf5plugin ({error}): {INSTALL}") from error
    return hdf5plugin


def filters_of(dataset: h5py.Dataset) -> list[str]:
    """The filters that a dataset's chunks pass when written, with gzip's and zstd's level: ["shuffle", "gzip:4",
    "fletcher32"]; empty if it has none."""
    names = []
    properties = dataset.id.get_create_plist()
    for index in range(properties.get_nfilters()):
        code, _, values, filter_name = properties.get_filter(index)
        name = FILTER_NAMES.get(code) or filter_name.decode(errors="replace") or f"filter {code}"
        names.append(f"{name}:{values[0]}" if name in ("gzip", "zstd") and values else name)
    return names


def check_readable(path: str, name: str, dataset: h5py.Dataset) -> None:
    """Make a dataset's filters available.

    Raises:
        DataError: one is not, here; names file, dataset and filter.
    """
    properties = dataset.id.get_create_plist()
    codes = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    for code, shown in zip(codes, filters_of(dataset)):
        if h5z.filter_avail(code):
            continue
        if code >= FIRST_REGISTERED:
            try:
                _plugin(f"filter {shown}")
            except UsageError as error:
                raise DataError(f"{path}: dataset {name!r}: {error}") from error
        if not h5z.filter_avail(code):
            raise DataError(
                f"{path}: dataset {name!r} is compressed with {shown} (HDF5 filter {code}), which neither HDF5"
                " nor hdf5plugin has here; store it with gzip, zstd or blosc"
            )
