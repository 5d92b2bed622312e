"""A worker's side of the tables: the rows of its present batch, and what backward says of them.

    missing rows    a pass over the batch without gradients, as far as the last look-up, names the ids
    forward         rows[places], where `rows` is a leaf with one row for every id that is held
    backward        leaves the gradient on that leaf: rows that occur several times are added up in it
    push            the touched rows of the leaf's gradient, and the ids of the next batch
    answer          the dense numbers, and the rows of those ids, of the same version

Invariants: what a batch is computed on are rows that came with the dense numbers of the answer before, so they are of
one version; only what that did not name is asked for in between, and is newer then, never older. Which ids a batch
needs is taken from the user's own forward pass, so nobody has to declare them. A pass that wants rows which are not
here stops with `RowsMissing`; they are fetched, and it begins anew with the same random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.embedding.partition import Partition
from mpitrain.embedding.sections import Section, What, join
from mpitrain.embedding.served import Found, look_up
from mpitrain.embedding.tables import Table, check_ids
from mpitrain.errors import UsageError

Ids = list[np.ndarray]  # of each table, strictly increasing


class RowsMissing(BaseException):
    """A pass has looked up rows that are not here. No `Exception`, for a model may handle these itself."""


class _Enough(BaseException):
    """A pass that only names ids has come to its last look-up."""


def union(found: Iterable[Ids]) -> Ids:
    """The ids of several, of each table."""
    return [np.unique(np.concatenate(ids)) for ids in zip(*found, strict=True)]


class Lookups:
    """The tables of one module, whose layers find their rows in whichever `HeldRows` are the present ones.

    Args:
        tables: of the module; num_servers: that hold them; device: of the module; dtype: of the rows.
    """

    def __init__(self, tables: Sequence[Table], num_servers: int, device: torch.device, dtype: torch.dtype):
        self.tables, self.device, self.dtype = list(tables), device, dtype
        self.partitions: list[Partition] = [table.partition(num_servers) for table in tables]
        self.num_servers = num_servers
        self.widths = [table.width for table in tables]
        self.present: HeldRows | None = None
        for number, table in enumerate(tables):
            if table.is_served:
                table.layer.find = functools.partial(self.find, number)
            else:
                table.layer.forward = _Forward(self, number, table.layer)

    def remove(self) -> None:
        """Let the layers look up their own weights again, and a `ServedEmbedding` nothing."""
        for table in self.tables:
            if table.is_served:
                table.layer.find = None
            else:
                vars(table.layer).pop("forward", None)
        self.present = None

    def sizes(self, server: int) -> list[int]:
        """Rows of each table on one server."""
        return [partition.size(server) for partition in self.partitions]

    def own_rows(self, size: int) -> Iterable[Ids]:
        """All ids of the layers that hold their own weight, at most so many at a time."""
        for number, table in enumerate(self.tables):
            for start in range(0, 0 if table.is_served else table.num_rows, size):
                ids = [np.zeros(0, np.int64) for _ in self.tables]
                ids[number] = np.arange(start, min(start + size, table.num_rows))
                yield ids

    def find(self, table: int, ids: torch.Tensor) -> Found:
        """The rows of `ids`."""
        assert self.present is not None, "a forward pass without a worker"
        return self.present.find(table, ids)


class _Forward:
    """In place of the forward pass of a layer of torch's own."""

    def __init__(self, lookups: Lookups, number: int, layer: nn.Module):
        self.lookups, self.number, self.layer = lookups, number, layer

    def __call__(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return look_up(self.lookups.find(self.number, input), self.layer, offsets, per_sample_weights)


class HeldRows:
    """The rows that one worker holds.

    Args:
        lookups: of its module; push_dtype: of gradients on the wire; wants_gradient: False for a validation.
    """

    def __init__(self, lookups: Lookups, push_dtype: torch.dtype, wants_gradient: bool = True):
        self.lookups, self.push_dtype, self.wants_gradient = lookups, push_dtype, wants_gradient
        count = len(lookups.tables)
        # by server, for each table what has come: slots as ids, and rows
        self._parts: list[list[list[tuple[np.ndarray, torch.Tensor]]]] = [
            [[] for _ in range(count)] for _ in range(lookups.num_servers)
        ]
        self._ids: Ids | None = None  # of the leaves; None where something has come since
        self._leaves: list[torch.Tensor] = []
        self._touched: list[torch.Tensor] = []
        self._named: list[list[np.ndarray]] = [[] for _ in range(count)]
        self._is_naming = False  # a pass that only names ids
        self._num_lookups = self._usual = 0  # in a pass, and the most in one that came to its end
        self.wanted: Ids | None = None  # with the next push

    # what has come

    def take(self, server: int, sections: Sequence[Section], anew: bool) -> None:
        """Rows of one server; `anew`: in place of all that were held of it."""
        if anew:
            self._parts[server] = [[] for _ in self.lookups.tables]
        for section in sections:
            if section.what == What.ROWS:
                assert section.slots is not None and section.values is not None
                ids = self.lookups.partitions[section.table].ids(server, section.slots)
                self._parts[server][section.table].append((ids, section.values.to(self.lookups.dtype)))
        self._ids = None

    def drop(self) -> None:
        """Hold nothing any more."""
        for server in range(self.lookups.num_servers):
            self.take(server, (), anew=True)

    def _compose(self) -> Ids:
        """Make leaves of what is held."""
        if self._ids is not None:
            return self._ids
        found, self._leaves, self._touched = [], list[torch.Tensor](), list[torch.Tensor]()
        for number, width in enumerate(self.lookups.widths):
            parts = [part for server in self._parts for part in server[number]]
            ids = np.concatenate([ids for ids, _ in parts]) if parts else np.zeros(0, np.int64)
            rows = torch.cat([rows for _, rows in parts]) if parts else torch.zeros(0, width)
            # of a row that has come twice, the last one: what came first has been asked for first
            order = np.argsort(ids, kind="stable")
            last = np.append(ids[order][1:] != ids[order][:-1], True)[: len(order)]
            order = order[last]
            leaf = rows.to(self.lookups.dtype)[torch.from_numpy(order)].to(self.lookups.device)
            found.append(ids[order])
            self._leaves.append(leaf.requires_grad_(self.wants_gradient))
            self._touched.append(torch.zeros(len(leaf), dtype=torch.bool))
        self._ids = found
        return found

    # look-ups

    def find(self, table: int, ids: torch.Tensor) -> Found:
        """Where the rows of `ids` lie.

        Raises:
            UsageError: an id is none of the table's; RowsMissing: rows are not here.
        """
        one = self.lookups.tables[table]
        flat = check_ids(one.name, one.num_rows, ids)
        self._num_lookups += 1
        if self._is_naming:
            self._named[table].append(flat)
            if self._num_lookups == self._usual:
                raise _Enough
        held = self._compose()[table]
        rows, at = self._leaves[table], np.searchsorted(held, flat)
        at[at == len(held)] = 0
        if len(flat) and not (len(held) and np.array_equal(held[at], flat)):
            if not self._is_naming:
                self._named[table].append(flat)
                raise RowsMissing
            held, at = np.unique(flat, return_inverse=True)
            rows = torch.zeros(len(held), one.width, dtype=rows.dtype, device=rows.device)
        elif not self._is_naming:
            self._touched[table][torch.from_numpy(at)] = True
        places = torch.from_numpy(at.reshape(tuple(ids.shape))).to(ids.device)
        return Found(places, rows, self._padding(table, held))

    def _padding(self, table: int, held: np.ndarray) -> int | None:
        padding = getattr(self.lookups.tables[table].layer, "padding_idx", None)
        if padding is None:
            return None
        at = int(np.searchsorted(held, padding))
        return at if at < len(held) and held[at] == padding else None

    # passes over a batch

    def name(self, run: Callable[[], Any]) -> Ids:
        """The ids that `run`, a forward pass, looks up, as far as it says so: it ends after as many look-ups as one
        that came to its end has had at most, and rows that are not here are zeros in it.

        Raises:
            UsageError: an id is none of its table's; whatever a pass raises before its first look-up. What it raises
                later may be due to the zeros.
        """
        self._is_naming, self._num_lookups = True, 0
        self._named = [[] for _ in self.lookups.tables]
        try:
            with torch.no_grad():
                run()
            self._usual = max(self._usual, self._num_lookups)
        except _Enough:
            pass
        except Exception as error:
            if isinstance(error, UsageError) or not self._num_lookups:
                raise
        finally:
            self._is_naming = False
        return self.take_named()

    def take_named(self) -> Ids:
        """What a pass has named; one that has just raised `RowsMissing`: what it looked up in vain."""
        found = [np.unique(np.concatenate(ids)) if ids else np.zeros(0, np.int64) for ids in self._named]
        self._named = [[] for _ in self.lookups.tables]
        return found

    def begin_step(self) -> None:
        """Forget gradients, and what was touched."""
        self._compose()
        for leaf, touched in zip(self._leaves, self._touched, strict=True):
            leaf.grad = None
            touched.zero_()

    def gradients(self) -> list[torch.Tensor]:
        """What backward has left, to look at and to scale in place."""
        return [leaf.grad for leaf in self._leaves if leaf.grad is not None]

    def leaves(self) -> list[torch.Tensor]:
        """The rows that are held, one tensor a table."""
        self._compose()
        return self._leaves

    def missing(self, ids: Ids) -> Ids:
        """Those of `ids` that are not held."""
        return [
            np.setdiff1d(want, have, assume_unique=True)
            for want, have in zip(ids, self._compose(), strict=True)
        ]

    # what travels

    def asking(self, ids: Ids) -> dict[int, torch.Tensor]:
        """A message for every server that holds some of these rows, by its number."""
        sections = self._parted(What.WANTED, ids, None)
        return {
            server: join(parts, self.lookups.sizes(server)) for server, parts in enumerate(sections) if parts
        }

    def pushed(self) -> list[list[Section]]:
        """For every server the gradients of touched rows, and what is wanted next."""
        found = [list[Section]() for _ in range(self.lookups.num_servers)]
        ids, values = [], []
        for held, leaf, touched in zip(self._compose(), self._leaves, self._touched, strict=True):
            places = torch.nonzero(touched).squeeze(1)
            ids.append(held[places.numpy()])
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            values.append(gradient[places.to(leaf.device)].to("cpu", self.push_dtype))
        wanted, self.wanted = self.wanted or [np.zeros(0, np.int64) for _ in ids], None
        for more in (self._parted(What.ROWS, ids, values), self._parted(What.WANTED, wanted, None)):
            for server, sections in enumerate(more):
                found[server] += sections
        return found

    def _parted(self, what: What, ids: Ids, values: list[torch.Tensor] | None) -> list[list[Section]]:
        found = [list[Section]() for _ in range(self.lookups.num_servers)]
        for table, (each, partition) in enumerate(zip(ids, self.lookups.partitions, strict=True)):
            servers, slots = partition.place(each)
            for server in range(self.lookups.num_servers) if len(each) else ():
                mine = np.flatnonzero(servers == server)
                mine = mine[np.argsort(slots[mine])]
                if len(mine):
                    numbers = None if values is None else values[table][torch.from_numpy(mine)]
                    found[server].append(Section(what, table, slots[mine], numbers))
        return found
