"""A server's side of one table: its rows, what the optimizer remembers of them, and the update of those that were
touched.

    sum of an update    s_r = sum over its gradients, in rank order, of weight g_r      for every row r that one touches
    step                the optimizer's own, on the touched rows as if they were a parameter

Invariants: a row begins when somebody first asks for it, or pushes to it; memory is taken then. A row that no gradient
of an update touches stays as it is, and so does what is remembered of it: for SGD and Adagrad that is what a gradient
of zeros would do, to the bit; optimizers for which it is not are refused. What is remembered of a whole parameter, as
the number of its steps, counts every update of the server, whether it touches this table or not.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.embedding.partition import Partition
from mpitrain.embedding.sections import Section
from mpitrain.errors import UsageError

Begin = Callable[[np.ndarray], torch.Tensor]


class TableShard:
    """The rows of one table that one server holds.

    Args:
        name: of the table; partition, server: which rows these are; width: numbers a row; dtype: of them.
        begin: the first values of rows, by their ids.
        group: of the optimizer.
    """

    def __init__(
        self, name: str, partition: Partition, server: int, width: int, dtype: torch.dtype, begin: Begin, group: int
    ):  # fmt: skip
        self.name, self.partition, self.server, self.group = name, partition, server, group
        self._begin_rows = begin
        self.rows = lazy_zeros((partition.size(server), width), dtype)
        self._seen = lazy_zeros((len(self.rows),), torch.uint8)
        self.parameter = nn.Parameter(torch.empty(0, width, dtype=dtype))
        self.parameter.rowwise = True  # type: ignore[attr-defined]
        self._remembered: dict[str, torch.Tensor] = {}  # by row
        self._piece: torch.Tensor | None = None  # by row: of which old shard it was, where that matters still
        self._gathered: list[tuple[int, torch.Tensor, torch.Tensor, float]] = []
        self._slots = torch.zeros(0, dtype=torch.int64)  # of the update
        self._sum: torch.Tensor | None = None
        self.first_remembered = 0.0

    @property
    def width(self) -> int:
        """Numbers a row."""
        return self.rows.shape[1]

    @torch.no_grad()
    def _see(self, slots: torch.Tensor) -> None:
        """Begin those rows that nobody has asked for."""
        new = slots[self._seen.index_select(0, slots) == 0]
        if len(new):
            ids = self.partition.ids(self.server, new.numpy())
            self.rows[new] = self._begin_rows(ids).to(self.rows.dtype)
            self._seen[new] = 1
            for values in self._remembered.values() if self.first_remembered else ():
                values[new] = self.first_remembered

    def see_all(self) -> None:
        """Begin all rows, a part at a time."""
        for part in torch.arange(len(self.rows)).split(1 << 16):
            self._see(part)

    def read(self, slots: np.ndarray) -> torch.Tensor:
        """The rows in these slots, a copy."""
        at = torch.from_numpy(slots)
        self._see(at)
        return self.rows.index_select(0, at)

    def without_pieces(self, section: Section, pieces: Iterable[int]) -> Section | None:
        """Gradients without those of rows that were of these old shards, numbered from 0; None where none is left."""
        assert section.slots is not None and section.values is not None
        if self._piece is None:
            return section
        at = torch.from_numpy(section.slots)
        mine = ~torch.isin(self._piece[at].long(), torch.tensor(sorted(pieces)) + 1)
        return section._replace(slots=at[mine].numpy(), values=section.values[mine]) if mine.any() else None

    # an update

    def gather(self, number: int, slots: np.ndarray, values: torch.Tensor, weight: float) -> None:
        """The `number`-th gradient of the update touches these rows."""
        self._gathered.append((number, torch.from_numpy(slots), values, weight))

    @torch.no_grad()
    def sum(self, num_gradients: int) -> torch.Tensor | None:
        """The sum of what was gathered, of which there are so many gradients, those without a row of this table
        included; None where no row is touched. A single one has not met its weight, as in `ShardStore`."""
        if self._sum is None and len(self._gathered) == 1:
            _, self._slots, values, weight = self._gathered[0]
            values = values.to(self.rows.dtype)
            self._sum = values * weight if num_gradients > 1 and weight != 1.0 else values
        elif self._sum is None and self._gathered:
            self._slots, places = torch.unique(
                torch.cat([slots for _, slots, _, _ in self._gathered]), return_inverse=True
            )
            self._sum = torch.zeros(len(self._slots), self.width, dtype=self.rows.dtype)
            at = 0
            for number, slots, values, weight in self._gathered:
                mine, at = places[at : at + len(slots)], at + len(slots)
                values = values.to(self.rows.dtype)
                if number == 0:
                    values = values * weight if num_gradients > 1 and weight != 1.0 else values
                else:
                    values = self._sum.index_select(0, mine).add_(values, alpha=weight)
                self._sum.index_copy_(0, mine, values)
        return self._sum

    def remember(self, optimizer: Optimizer) -> None:
        """Memory for what `optimizer` keeps of every row from its beginning."""
        for key, value in optimizer.state.get(self.parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                self._memory(key, value)

    def _memory(self, key: str, like: torch.Tensor) -> torch.Tensor:
        if key not in self._remembered:
            self._remembered[key] = lazy_zeros((len(self.rows), *like.shape[1:]), like.dtype)
            if self.first_remembered:
                self._remembered[key][self._begun()] = self.first_remembered
        return self._remembered[key]

    @torch.no_grad()
    def begin_step(self, optimizer: Optimizer, num_updates: int) -> None:
        """Make the touched rows the parameter that `optimizer` updates; `num_updates`: that it has made."""
        if self._sum is None:
            self.parameter.grad = None
            return
        self._see(self._slots)
        self.parameter.data = self.rows.index_select(0, self._slots)
        self.parameter.grad = self._sum
        state = optimizer.state[self.parameter]
        for key, values in self._remembered.items():
            state[key] = values.index_select(0, self._slots)
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(num_updates)

    @torch.no_grad()
    def end_step(self, optimizer: Optimizer) -> None:
        """The rows are as the step has left them."""
        if self._sum is not None:
            self.rows.index_copy_(0, self._slots, self.parameter.data)
            state = optimizer.state.get(self.parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 2:
                    self._memory(key, value).index_copy_(0, self._slots, value)
                    state[key] = value[:0]
            self.parameter.data = self.parameter.data[:0]
        self.parameter.grad = self._sum = None
        self._gathered.clear()

    # checkpoints

    def state(self) -> dict[str, Any]:
        """The rows that have begun, by id, with what is remembered of them; copies."""
        slots = self._begun()
        found = self.begun() | {
            "remembered": {key: values[slots] for key, values in self._remembered.items()}
        }
        if self._piece is not None:
            found["piece"] = self._piece[slots]
        return found

    def begun(self) -> dict[str, Any]:
        """The "rows" that have begun, and their "ids"; copies."""
        slots = self._begun()
        ids = self.partition.ids(self.server, slots.numpy())
        return {"ids": torch.from_numpy(ids), "rows": self.rows[slots]}

    def _begun(self) -> torch.Tensor:
        return torch.nonzero(self._seen).squeeze(1)

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; rows that fall to other servers are left out.

        Raises:
            UsageError: the rows were of another width.
        """
        if state["rows"].shape[1:] != (self.width,):
            raise UsageError(
                f"the checkpoint's table {self.name!r} has rows of {state['rows'].shape[1]} numbers, this one of "
                f"{self.width}: resume with the model that it was written with"
            )
        servers, slots = self.partition.place(state["ids"].numpy())
        mine = torch.from_numpy(np.flatnonzero(servers == self.server))
        at = torch.from_numpy(slots)[mine]
        self.rows[at], self._seen[at] = state["rows"][mine], 1
        for key, values in state["remembered"].items():
            self._memory(key, values)[at] = values[mine]
        if "piece" in state:
            if self._piece is None:
                self._piece = lazy_zeros((len(self.rows),), torch.int16)
            self._piece[at] = state["piece"][mine]


def joined_states(states: Sequence[dict[str, Any]], num_pieces: Sequence[int]) -> dict[str, Any]:
    """The states of all servers of a table as one.

    Args:
        num_pieces: how many old shards each server was still put together from. Their numbers go on from those before,
            and the next one is the server's own, of rows that it has begun itself.
    """
    keys = {key for state in states for key in state["remembered"]}
    pieces, before = [], 0
    for state, count in zip(states, num_pieces, strict=True):
        none = torch.zeros(len(state["ids"]), dtype=torch.int16)
        old = state.get("piece", none) if count else none
        pieces.append(torch.where(old > 0, old, count + 1) + before)
        before += count + 1
    return {
        "ids": torch.cat([state["ids"] for state in states]),
        "rows": torch.cat([state["rows"] for state in states]),
        "remembered": {key: torch.cat(_each(states, key)) for key in keys},
        "piece": torch.cat(pieces),
    }


def _each(states: Sequence[dict[str, Any]], key: str) -> list[torch.Tensor]:
    """What is remembered of the rows of each state; zeros where a server has not made a step yet."""
    known = next(state["remembered"][key] for state in states if key in state["remembered"])
    return [
        state["remembered"].get(key, known.new_zeros(len(state["ids"]), *known.shape[1:])) for state in states
    ]


# ---- Zeros that take memory where they are written, and not before.
#
# Invariants: the kernel commits a page of 4 KiB when it is first touched, and counts nothing before that, so a table
# may be larger than what is there as long as what is used of it is not. Larger pages are declined: a row would commit 2
# MiB.


_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's, where this Python does not name it


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in host memory of its own.

    Raises:
        MemoryError: the address space is used up.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes for a tensor of shape {shape}: {error}") from error
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)
