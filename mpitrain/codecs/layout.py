"""What the numbers of a message belong to: named fields in flat tensors, and which of them are coded.

Invariants: sender and receiver get the same plan from the same layouts, so a message need not hold where
its numbers go. Fields of fewer than `dense_below` numbers (biases, norms) travel in full: they are few and
sensitive. The others, one after another, are the *coded space*, in which indices count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpitrain.codecs.lazy import torch
from mpitrain.errors import UsageError

# So many float32 stay in a core's cache while several passes go over them.
CHUNK = 1 << 17


class Field(NamedTuple):
    """One parameter, or a piece of one, in a flat tensor: [start, start + product(shape))."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return torch.Size(self.shape).numel()


Layout = tuple[Field, ...]


class Part(NamedTuple):
    """A flat float32 tensor and the fields that fill it. A message is made of one or more of them."""

    flat: torch.Tensor
    layout: Layout


class Run(NamedTuple):
    """[start, stop) of one part, at `offset` of the coded space (or of the dense numbers)."""

    part: int
    start: int
    stop: int
    offset: int


class Plan(NamedTuple):
    """fields: every coded field with its part and offset; runs: the same, neighbours joined; dense: the rest."""

    fields: tuple[tuple[int, Field, int], ...]
    runs: tuple[Run, ...]
    dense: tuple[Run, ...]
    num_coded: int
    num_dense: int

    def chunks(self, size: int = CHUNK) -> Iterator[Run]:
        """The runs in pieces of at most `size` numbers; every chunk but a run's last has exactly `size`."""
        for part, start, stop, offset in self.runs:
            for low in range(start, stop, size):
                yield Run(part, low, min(low + size, stop), offset + low - start)

    def field_chunks(self, size: int = CHUNK) -> Iterator[tuple[Field, Run]]:
        """The same, but no chunk reaches over the end of a field: what is done to one does not depend on its
        neighbours, so a message's numbers stay what they are when buckets are rebuilt."""
        for part, field, offset in self.fields:
            for low in range(0, field.numel, size):
                high = min(low + size, field.numel)
                yield field, Run(part, field.start + low, field.start + high, offset + low)


@lru_cache(maxsize=64)
def make_plan(layouts: tuple[Layout, ...], dense_below: int) -> Plan:
    """How parts with these layouts are coded.

    Raises:
        UsageError: a name occurs twice, or fields do not fill their part one after another.
    """
    fields: list[tuple[int, Field, int]] = []
    coded: list[Run] = []
    dense: list[Run] = []
    sizes = [0, 0]
    seen: set[str] = set()
    for part, layout in enumerate(layouts):
        at = 0
        for field in layout:
            if field.name in seen or field.start != at:
                raise UsageError(f"layout: field {field.name!r} at {field.start} is doubled or not at {at}")
            seen.add(field.name)
            at += field.numel
            is_coded = field.numel >= max(1, dense_below)
            runs, which = (coded, 0) if is_coded else (dense, 1)
            if is_coded:
                fields.append((part, field, sizes[0]))
            if runs and runs[-1].part == part and runs[-1].stop == field.start:
                runs[-1] = runs[-1]._replace(stop=at)
            else:
                runs.append(Run(part, field.start, at, sizes[which]))
            sizes[which] += field.numel
    return Plan(tuple(fields), tuple(coded), tuple(dense), sizes[0], sizes[1])


def plan_of(parts: Sequence[Part], dense_below: int) -> Plan:
    """The plan of these parts.

    Raises:
        UsageError: a flat tensor that is not 1-D float32, or not as long as its layout.
    """
    for flat, layout in parts:
        wanted = sum(field.numel for field in layout)
        if flat.dtype != torch.float32 or flat.dim() != 1 or flat.numel() != wanted:
            raise UsageError(
                f"a codec takes flat float32 tensors of their layout's size ({wanted}), got "
                f"{flat.dtype} of shape {tuple(flat.shape)}"
            )
    return make_plan(tuple(part.layout for part in parts), dense_below)


def whole(flat: torch.Tensor, name: str = "flat") -> list[Part]:
    """`flat` as one part of one field: for those who have no names."""
    return [Part(flat, (Field(name, tuple(flat.shape), 0),))]
