"""What packing asks of a source: how many samples, in which order, and which of them at a time.

Invariants: a source is read deterministically, in bounded memory, by any number of ranks at once, and
nothing from it is executed (no pickle), but for Python that the user named. Its order is a function of the seed
and of its own layout, never of which rank reads which part.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mpitrain.data.format.columns import (
    Column,
    Columns,
    Ragged,
    check_columns,
    num_samples,
    sample_bytes,
    take,
)
from mpitrain.data.read.order import SPLIT, IntArray, Order, permutation
from mpitrain.data.sources.noted import Noted
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import MAX_GIB, Trust

PROBES = 64  # samples looked at to learn what they are like
MIXED_BYTES = 4 << 30  # a source up to this size is permuted as a whole, a larger one in blocks
BLOCK_BYTES, WINDOW_BYTES = 1 << 20, 1 << 30
# What images may lose where somebody accepts it.
LOSSES = {
    "frames": "all frames or pages but the first",
    "transparency": "which pixels are transparent",
    "depth": "all bits of a channel but the first 8, of floats but 32",
    "channels": "all channels but those of its colours",
    "colors": "other colours than RGB's, such as CMYK, are rounded",
}


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source.

    Args:
        arrays: which arrays to pack and what to call them, such as "x=a+b,y=label"; see `Selection`.
        variable: names of arrays whose samples differ in length (Python sources; files say so themselves).
        image_size: (height, width) that images are scaled and cropped to; None: all have the same already.
        encoded: keep images as the bytes of their files.
        accept_loss: what images may lose, names of `LOSSES`; otherwise one that would lose it is refused.
        allow_external: read also what lies elsewhere: links out of the folder, datasets in other HDF5 files.
        max_gib: memory that a file may take by what it merely declares.
        source: what the index calls it; None: by its path or pattern, or "Python".
    """

    arrays: str | None = None
    variable: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    encoded: bool = False
    accept_loss: tuple[str, ...] = ()
    allow_external: bool = False
    max_gib: float = MAX_GIB
    source: str | None = None

    def __post_init__(self) -> None:
        if not self.max_gib > 0:
            raise UsageError(f"--max-gib must be above 0, got {self.max_gib}")
        if unknown := sorted({*self.accept_loss} - {*LOSSES}):
            raise UsageError(f"--accept-loss {unknown[0]!r}: is none of {', '.join(LOSSES)}")

    @property
    def trust(self) -> Trust:
        """What the files may do."""
        return Trust(self.allow_external, self.max_gib)

    def recipe(self) -> dict[str, Any]:
        """What the index holds of them: all that is not usual."""
        recipe: dict[str, Any] = {"arrays": self.arrays, "variable": list(self.variable)}
        recipe |= {
            "image_size": self.image_size,
            "encoded": self.encoded,
            "accept_loss": sorted(self.accept_loss),
            "allow_external": self.allow_external,
        }
        return {name: value for name, value in recipe.items() if value}

    def given(self) -> list[str]:
        """Names of all that are not usual."""
        return [*self.recipe(), *(["max_gib"] if self.max_gib != MAX_GIB else [])]


@contextlib.contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Around the import of a package that an extra brings: `UsageError` where it is not here."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{what}, which is not here ({error}): pip install 'mpitrain[{extra}]'") from error


class Source:
    """Samples with random access; a subclass says `take`, and what `num_samples` and `sample_bytes` are.

    Attributes:
        name: what the index calls it; num_samples; sample_bytes: mean size of one in a shard.
        block_sizes: samples of each block that is read at once; None where any sample costs the same.
        window_blocks: blocks that are mixed with each other, and held in memory together.
        chosen: what the index holds of the options it was opened with.
    """

    name: str
    num_samples: int
    sample_bytes: float
    block_sizes: IntArray | None = None
    window_blocks: int = 1
    chosen: Mapping[str, Any] = MappingProxyType({})
    _permutation: IntArray | None = None
    _order: Order | None = None

    @functools.cached_property
    def noted(self) -> Noted:
        """What has happened to the samples that were taken."""
        return Noted()

    @functools.cached_property
    def left_out(self) -> Noted:
        """What is there and no sample, for its name."""
        return Noted()

    def remarks(self) -> list[str]:
        """What people should know before the samples are packed, such as files that are left out."""
        return self.left_out.lines()

    def look_ahead(self, until: float) -> list[str]:
        """Look for what would end packing late, or training, as long as `time.monotonic` is below `until`; what people
        should know.

        Raises:
            DataError: packing will end at a sample; names it.
        """
        return []

    def shuffle(self, seed: int) -> None:
        """Fix the order: a permutation of everything, or blockwise where that would be read many times over."""
        sizes = self.block_sizes
        if sizes is None and self.num_samples * self.sample_bytes > MIXED_BYTES:
            block = max(1, int(BLOCK_BYTES / self.sample_bytes))
            starts = np.arange(0, self.num_samples, block)
            sizes = np.minimum(block, self.num_samples - starts)
            self.window_blocks = max(1, int(WINDOW_BYTES / (block * self.sample_bytes)))
        if sizes is None:
            self._permutation = permutation(self.num_samples, seed, SPLIT)
        else:
            self._order = Order(sizes, self.window_blocks, seed)

    def read(self, start: int, count: int) -> Columns:
        """The samples at positions [start, start + count) of the order, no longer than a chunk.

        Raises:
            DataError: a sample is damaged or unlike the others; names it.
        """
        if self._permutation is not None:
            return self.take(self._permutation[start : start + count])
        assert self._order is not None, "shuffle comes first"
        return self.take(self._order.samples(0, start, count))

    def take(self, rows: IntArray) -> Columns:
        """The samples of these numbers, in that order."""
        raise NotImplementedError

    def probe(self) -> Columns:
        """A few samples from all over, which show what the others are like."""
        return self.take(np.unique(np.linspace(0, self.num_samples - 1, PROBES).astype(np.int64)))

    def fingerprint(self) -> str:
        """What identifies its content, as hexadecimal digits."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What else the index should hold, such as the names of classes."""
        return {}


class ArraySource(Source):
    """Arrays in memory, or mapped into it."""

    def __init__(self, columns: Mapping[str, Column], name: str, files: Sequence[Path] = ()):
        self._columns: Columns = dict(sorted(columns.items()))
        check_columns(self._columns, name)
        self.name, self._files = name, files
        self.num_samples = num_samples(self._columns)
        self.sample_bytes = sample_bytes(self._columns)

    def take(self, rows: IntArray) -> Columns:
        return take(self._columns, rows)

    def fingerprint(self) -> str:
        return file_fingerprint(self._files) if self._files else content_digest(self._columns)


def content_digest(columns: Mapping[str, Column]) -> str:
    """SHA-256 of columns' names, types and values."""
    digest = hashlib.sha256()
    for name, column in columns.items():
        if isinstance(column, Ragged):
            digest.update(f"{name} lengths;".encode() + np.ascontiguousarray(column.lengths).tobytes())
        array = column.flat if isinstance(column, Ragged) else column
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        digest.update(f"{name} {native.dtype.name} {array.shape};".encode())
        digest.update(native.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def file_fingerprint(paths: Iterable[str | os.PathLike[str]]) -> str:
    """SHA-256 of files' names, sizes and times of change, in this order; reads none of them."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be looked at ({error.strerror})") from error
        name = os.path.basename(os.fspath(path))
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns};".encode(errors="surrogateescape"))
    return digest.hexdigest()


class Selection:
    """Which arrays to pack under which names: `x=a+b,y=label` makes `x` of the columns a and b side by side and `y`
    of label; `x=*` takes all numbers that nothing else takes; a name alone is kept. Without text all are kept. A
    column that is called "a+b" or "a, b" is that column before the signs in it mean anything.

    Raises:
        UsageError: text of another form; when applied, a column that is not there.
    """

    def __init__(self, text: str | None):
        self.text = text
        self.parts: dict[str, list[str]] = {}
        self._fault: UsageError | None = (
            None  # of a text that makes no sense unless columns have signs in their names
        )
        try:
            self.parts = self._read(())
        except UsageError as error:
            self._fault = error

    def _read(self, there: Sequence[str]) -> dict[str, list[str]]:
        text, parts = self.text or "", {}
        odd = sorted((name for name in there if set(name) & set("+,=")), key=len, reverse=True)
        for number, name in enumerate(odd):
            text = text.replace(name, f"\0{number}\0")
        for part in text.split(",") if text else []:
            new, renamed, old = part.strip().partition("=")
            words = [word.strip() for word in (old if renamed else new).split("+")]
            if not new.isidentifier() or new in parts or "" in words:
                raise UsageError(
                    f"--arrays {self.text!r}: expected NAME=COLUMN[+COLUMN...],..., such as x=a+b,y=label"
                )
            parts[new] = [re.sub("\0([0-9]+)\0", lambda found: odd[int(found[1])], word) for word in words]
        return parts

    @property
    def named(self) -> list[str]:
        """The columns it names, "*" among them."""
        if self._fault is not None:
            raise self._fault
        return list(dict.fromkeys(old for olds in self.parts.values() for old in olds))

    def wanted(self, there: Sequence[str]) -> list[str]:
        """The columns to read among those that are there."""
        self.parts, self._fault = self._read(there), None
        if not self.parts:
            return list(there)
        named = [old for old in self.named if old != "*"]
        for old in named:
            if old not in there:
                raise UsageError(f"--arrays {self.text!r}: there is no {old!r}; there are {', '.join(there)}")
        return list(there) if "*" in self.named else named

    def of(self, columns: Columns) -> Columns:
        """The arrays made of all there is."""
        self.wanted(list(columns))
        return self.apply(columns)

    def apply(self, columns: Columns) -> Columns:
        """The arrays made of the wanted columns."""
        if not self.parts:
            return columns
        rest = [name for name in columns if name not in self.named]
        made = {
            new: _beside(new, [columns[old] for old in (rest if olds == ["*"] else olds)], olds != ["*"])
            for new, olds in self.parts.items()
        }
        return dict(sorted(made.items()))


def _beside(name: str, columns: list[Column], alone: bool) -> Column:
    """One column as it is, or several of one number a sample as the entries of one."""
    if len(columns) == 1 and alone:
        return columns[0]
    arrays = [column for column in columns if not isinstance(column, Ragged) and column.ndim == 1]
    if not columns or len(arrays) < len(columns):
        raise UsageError(f"--arrays: {name!r} joins columns that are not numbers; name those that are")
    return np.stack(arrays, axis=1)
