"""What travels beside the dense numbers of a shard: sections of a message, one behind the other.

    message   "mptt" | number of sections u32 | section ... section
    section   kind u8 | coder u8 | element u8 | - | table u32 | count u64 | bytes of ids, bytes of values u64 |
              ids, padded to 8 bytes | values, padded to 8 bytes

Invariants: a message describes itself, so it needs no memory of what was asked before. Slots are strictly increasing
and coded as in `codecs/index_coding.py`, by whichever coder takes the fewest bytes. A section of dense numbers, or of a
codec's message, has no ids.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.codecs.index_coding import decode, encode
from mpitrain.errors import WireError

_MAGIC = b"mptt"
_START = struct.Struct("<4sI")
_SECTION = struct.Struct("<BBBxIQQQ")
_ELEMENTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8)


class What(enum.IntEnum):
    """What a section holds. Append, never renumber."""

    DENSE = 0  # numbers of the shard
    CODED = 1  # a codec's message for them
    ROWS = 2  # rows of a table, or their gradients
    WANTED = 3  # slots of a table, whose rows are asked for


class Section(NamedTuple):
    """One section.

    what: its kind; table: its number; slots: int64, strictly increasing, empty where there are none; values: of any
    shape whose first dimension is the number of slots; 1-D without slots; None where only slots are named.
    """

    what: What
    table: int = 0
    slots: np.ndarray | None = None
    values: torch.Tensor | None = None


def _bytes(message: torch.Tensor) -> memoryview:
    return memoryview(message.numpy())  # type: ignore[arg-type]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def join(sections: Iterable[Section], sizes: list[int]) -> torch.Tensor:
    """The sections as one message, 1-D uint8; `sizes`: slots of each table, of the server that they belong to."""
    bodies: list[tuple[bytes, np.ndarray, torch.Tensor | None]] = []
    total = _START.size
    for section in sections:
        coder, ids = 0, np.zeros(0, np.uint8)
        count = 0 if section.slots is None else len(section.slots)
        if section.slots is not None:
            coder, ids = encode(section.slots, sizes[section.table])
        values = None if section.values is None else section.values.contiguous().reshape(-1)
        element = _ELEMENTS.index(torch.uint8 if values is None else values.dtype)
        raw = None if values is None else values.view(torch.uint8)
        num_values = 0 if raw is None else raw.numel()
        header = _SECTION.pack(section.what, coder, element, section.table, count, len(ids), num_values)
        bodies.append((header, ids, raw))
        total += _SECTION.size + _padded(len(ids)) + _padded(num_values)
    message = torch.zeros(total, dtype=torch.uint8)
    view, at = message.numpy(), _START.size
    view[:at] = np.frombuffer(_START.pack(_MAGIC, len(bodies)), np.uint8)
    for header, ids, raw in bodies:
        view[at : at + _SECTION.size] = np.frombuffer(header, np.uint8)
        at += _SECTION.size
        view[at : at + len(ids)] = ids
        at += _padded(len(ids))
        if raw is not None:
            message[at : at + raw.numel()] = raw
            at += _padded(raw.numel())
    return message


def split(message: torch.Tensor, sizes: list[int], widths: list[int]) -> list[Section]:
    """The sections of a message; values are views of it. `widths`: of each table's rows.

    Raises:
        WireError: it is none, or names what these tables have not.
    """
    try:
        magic, num_sections = _START.unpack_from(_bytes(message))
        if magic != _MAGIC:
            raise WireError(f"a message of tables begins with {magic!r}: another version of mpitrain?")
        sections, at = [], _START.size
        for _ in range(num_sections):
            section, at = _read(message, at, sizes, widths)
            sections.append(section)
        return sections
    except (struct.error, ValueError, IndexError, RuntimeError) as error:
        raise WireError(f"a damaged message of tables, {message.numel()} bytes: {error}") from error


def _read(message: torch.Tensor, at: int, sizes: list[int], widths: list[int]) -> tuple[Section, int]:
    kind, coder, element, table, count, num_ids, num_values = _SECTION.unpack_from(_bytes(message), at)
    at += _SECTION.size
    what, slots = What(kind), None
    end = at + _padded(num_ids) + _padded(num_values)
    if end > message.numel() or count > max(sizes[table], 1):
        raise ValueError(f"section {what.name} ends at {end} and names {count} rows")
    if what in (What.ROWS, What.WANTED):
        slots = decode(coder, message[at : at + num_ids].numpy(), count, sizes[table])
    at += _padded(num_ids)
    values = message[at : at + num_values].view(_ELEMENTS[element]) if what != What.WANTED else None
    if what == What.ROWS:
        assert values is not None
        values = values.view(count, widths[table])
    return Section(what, table, slots, values), end
