"""WebDataset archives: tar files in which neighbouring members with the same name up to its first dot are a sample.

An ending is an array, in whatever case it is written: `.npy` as it is, `.cls` and `.index` a whole number, images as in
an image folder, anything else its bytes. Members are read where they lie, in any order, so ranks share the work;
archives must not be compressed. No member is dropped unsaid: what is no part of a sample is counted, what stands twice
or is a link is refused.
"""

from __future__ import annotations

import functools
import io
import os
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format.columns import Column, Columns, Ragged, check_columns, sample_bytes
from mpitrain.data.read.order import IntArray
from mpitrain.data.sources.base import Selection, Source, SourceOptions, file_fingerprint
from mpitrain.data.sources.files import read_npy
from mpitrain.data.sources.images import VERSION, images_column, is_image
from mpitrain.data.sources.noted import Noted
from mpitrain.data.sources.pixels import look_at_headers
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import Trust, open_regular, reading

NUMBERS = ("cls", "index", "id")
PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
MAX_OPEN = 32
MAX_HEADER_BYTES = 1 << 20
Place = tuple[int, int, int]  # archive, offset, bytes


class TarSource(Source):
    """The samples of WebDataset archives."""

    def __init__(self, paths: list[Path], name: str, options: SourceOptions):
        self.name, self._paths, self._options = name, paths, options
        self._open: OrderedDict[int, int] = OrderedDict()
        self._samples: list[tuple[str, dict[str, Place]]] = []
        for number, path in enumerate(paths):
            self._samples += _index(number, path, self.left_out)
        self.num_samples = len(self._samples)
        if not self._samples:
            raise DataError(f"{paths[0]}: holds no files")
        self._selection = Selection(options.arrays)
        self._endings = self._selection.wanted(sorted(self._samples[0][1]))
        if not self._selection.parts:
            self._check_nothing_more()
        for ending in self._endings:
            if ending.rpartition(".")[2] in PICKLED:
                raise UsageError(
                    f"{paths[0]}: .{ending} is pickled Python, which is not executed; leave it out: --arrays"
                )
        self.sample_bytes = sample_bytes(self.probe())

    def _check_nothing_more(self) -> None:
        """Refuse samples with arrays that the first one lacks, for nothing would be packed of them."""
        first = self._samples[0][1].keys()
        for key, parts in self._samples:
            if more := parts.keys() - first:
                raise DataError(
                    f"{self._paths[_first(parts)[0]]}: {key}.{min(more)}: is not in the first sample, "
                    f"{self._samples[0][0]}; every sample needs the same endings, or name those to take: --arrays"
                )

    def look_ahead(self, until: float) -> list[str]:
        lines = []
        for ending in (ending for ending in self._endings if is_image("." + ending)):
            images = [
                (
                    f"{self._paths[parts[ending][0]]}: {key}.{ending}",
                    functools.partial(self._head, parts[ending]),
                )
                for key, parts in self._samples
                if ending in parts
            ]
            lines += look_at_headers(images, self._options, until)
        return lines

    def _head(self, place: Place) -> io.BytesIO:
        number, offset, size = place
        return io.BytesIO(self._content("", (number, offset, min(size, MAX_HEADER_BYTES))))

    def take(self, rows: IntArray) -> Columns:
        samples = [self._samples[row] for row in rows.tolist()]
        columns = {ending: self._column(ending, samples) for ending in self._endings}
        made = self._selection.apply(columns)
        if not self._selection.parts:
            made = {ending.replace(".", "_").replace("-", "_"): column for ending, column in columns.items()}
        check_columns(made, self.name)
        return made

    def _column(self, ending: str, samples: list[tuple[str, dict[str, Place]]]) -> Column:
        names = [f"{self._paths[_first(parts)[0]]}: {key}.{ending}" for key, parts in samples]
        contents = [self._content(name, parts.get(ending)) for name, (_, parts) in zip(names, samples)]
        last = ending.rpartition(".")[2]
        if is_image("." + last):
            return images_column(contents, names, self._options, self.noted)
        if last in NUMBERS:
            return np.array([_number(content, name) for content, name in zip(contents, names)])
        if last != "npy":
            return Ragged.of([np.frombuffer(content, dtype=np.uint8) for content in contents])
        arrays = [_npy(content, name, self._options.trust) for content, name in zip(contents, names)]
        if last in self._options.variable or ending in self._options.variable:
            return Ragged.of(arrays)
        for array, name in zip(arrays, names):
            if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
                found = f"{array.dtype}{list(array.shape)}, expected {arrays[0].dtype}{list(arrays[0].shape)}"
                raise DataError(f"{name}: is {found}; if samples differ in length: --variable {ending}")
        return np.stack(arrays)

    def _content(self, name: str, place: Place | None) -> bytes:
        if place is None:
            raise DataError(
                f"{name}: is not in the archive; every sample needs the same endings, its members beside one another "
                "(tar --sort=name), and a sample's name ends at its first dot"
            )
        number, offset, size = place
        try:
            if number not in self._open:
                if len(self._open) >= MAX_OPEN:
                    os.close(self._open.popitem(last=False)[1])
                self._open[number] = os.open(self._paths[number], os.O_RDONLY)
            content = os.pread(self._open[number], size, offset)
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error.strerror})") from error
        if len(content) < size:
            raise DataError(f"{name}: the archive is truncated; copy it again")
        return content

    def fingerprint(self) -> str:
        return file_fingerprint(self._paths)

    def facts(self) -> dict[str, Any]:
        decoded = [ending for ending in self._endings if is_image("." + ending)] and not self._options.encoded
        return {"decoding": VERSION} if decoded else {}


def _first(parts: dict[str, Place]) -> Place:
    return next(iter(parts.values()))


class _Headers:
    """An archive's file of which only headers are read: no longer ones than these need be."""

    def __init__(self, file: io.BufferedReader):
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"it declares a header of {size} bytes")
        return self._file.read(size)


def _index(number: int, path: Path, left_out: Noted) -> list[tuple[str, dict[str, Place]]]:
    """(key, ending -> place) of each sample of an archive, in its order.

    Raises:
        DataError: from `_ending_of` and `_check_member`; a name stands twice.
    """
    samples: list[tuple[str, dict[str, Place]]] = []
    keys: set[str] = set()
    with (
        reading(str(path), "read as an uncompressed tar file", "unpack it, or write it anew"),
        open_regular(path) as file,
    ):
        end = os.fstat(file.fileno()).st_size
        headers: Any = _Headers(file)
        with tarfile.open(fileobj=headers, mode="r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                if member.isdir():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not stem or not ending:
                    left_out.add(
                        "members of archives are left out: they have no name and ending of a sample",
                        f"{path}: {member.name}",
                    )
                    continue
                _check_member(path, member, end)
                key, ending = (
                    f"{folder}/{stem}" if folder else stem,
                    _checked_ending(path, member.name, ending),
                )
                if not samples or samples[-1][0] != key:
                    if key in keys:
                        raise DataError(
                            f"{path}: {member.name!r} belongs to {key!r}, whose members ended before: the name stands "
                            "twice, or the archive is not sorted; write it anew with one of each, tar --sort=name"
                        )
                    keys.add(key)
                    samples.append((key, {}))
                if ending in samples[-1][1]:
                    raise DataError(
                        f"{path}: {member.name!r} stands twice, and which one is meant cannot be known; write the "
                        "archive anew with one of them"
                    )
                samples[-1][1][ending] = number, member.offset_data, member.size
    return samples


def _check_member(path: Path, member: tarfile.TarInfo, end: int) -> None:
    """Refuse what is not a file's bytes in this archive of `end` bytes."""
    fault = ""
    if not member.isfile():
        raise DataError(
            f"{path}: {member.name!r} is a link or a device and holds no bytes; write the archive anew with "
            "tar --dereference --hard-dereference"
        )
    if member.issparse():
        fault = "is sparse"
    elif member.size < 0 or member.offset_data + member.size > end:
        fault = f"declares {member.size} bytes and the archive has {end}"
    if fault:
        raise DataError(
            f"{path}: {member.name!r} {fault}: truncated or forged; copy it again, or write it anew"
        )


def _checked_ending(path: Path, name: str, ending: str) -> str:
    """An ending in small letters.

    Raises:
        DataError: it cannot be an array's, as of "1.5.cls".
    """
    if not ending.partition(".")[0].replace("-", "_").isidentifier():
        raise DataError(
            f"{path}: the ending of {name!r} is {ending!r}, which is no array's name: a sample's name ends at its "
            "first dot; write the archive anew with another sign for the dots before the ending, such as _"
        )
    return ending.lower()


def _number(content: bytes, name: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise DataError(f"{name}: is {content[:40]!r}, expected a whole number") from error


def _npy(content: bytes, name: str, trust: Trust) -> Any:
    with reading(name, "read as .npy", "write it with numpy.save"):
        return read_npy(io.BytesIO(content), name, len(content), trust)
