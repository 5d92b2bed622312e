"""A server's shard of a model with tables: dense numbers as in any shard, and the rows that fall to this server.

Invariants: a push and its answer are one message each, so what holds for dense numbers holds for rows: a gradient is
added once or not at all, and rows are of the version that the dense numbers beside them are. The mean of an update is
over its gradients, also where only one of them touches a row: the others are zero there. A gradient is clipped by the
norm of all of it, rows and dense numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpitrain.embedding.sections import Section, What, join, split
from mpitrain.embedding.shard import TableShard, joined_states
from mpitrain.errors import WireError
from mpitrain.model.shards.server_shard import ShardStore
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer


class TabledPush:
    """A worker's push, taken apart: `dense` as in any shard, and the gradients of rows."""

    def __init__(self, dense: FixedBuffer | VariableBuffer, rows: list[Section], num_bytes: int):
        self.dense, self.rows, self.num_bytes = dense, rows, num_bytes

    def statistics(self) -> dict[str, float]:
        """What the run's progress reports of it."""
        touched = sum(len(one.slots) for one in self.rows if one.slots is not None)
        return self.dense.statistics() | {"rows": float(touched)}

    def release(self) -> None:
        """It is not needed any more."""
        self.dense.release()


class TabledStore(ShardStore):
    """One shard, with its part of every table; the other arguments are those of `ShardStore`."""

    def __init__(self, tables: Sequence[TableShard], *arguments: Any):
        super().__init__(*arguments, tables=tables)  # type: ignore[misc]
        self._sizes, self._widths = [len(one.rows) for one in tables], [one.width for one in tables]
        self._wanted: dict[int, list[Section]] = {}  # of each worker, with its last push
        self._num_updates = 0
        for table in tables:
            options_of = next(
                group for group in self.optimizer.param_groups if group["params"][0] is table.parameter
            )
            table.first_remembered = float(options_of.get("initial_accumulator_value", 0.0))
            table.remember(self.optimizer)

    def wire_buffer(self) -> VariableBuffer:
        """An empty wire buffer for a push."""
        return VariableBuffer()

    # what arrives

    def arrive(self, worker: int, payload: VariableBuffer) -> TabledPush:
        """A push taken apart, and what its worker wants to read next remembered; the payload is released."""
        dense: FixedBuffer | VariableBuffer | None = None
        rows: list[Section] = []
        self._wanted[worker] = []
        for section in split(payload.body, self._sizes, self._widths):
            if section.what == What.DENSE:
                dense = self.arrivals.take()
                assert section.values is not None
                if section.values.shape != dense.body.shape or section.values.dtype != dense.body.dtype:
                    raise WireError(
                        f"rank {worker} pushes {section.values.shape} where {dense.body.shape} is due"
                    )
                dense.body.copy_(section.values)
            elif section.what == What.CODED:
                dense = VariableBuffer(section.values)
            elif section.what == What.WANTED:
                self._wanted[worker].append(section)
            else:
                rows.append(section)
        if dense is None:
            raise WireError(f"rank {worker} pushes no dense numbers: another version of mpitrain?")
        num_bytes = payload.num_bytes
        payload.release()
        return TabledPush(dense, rows, num_bytes)

    def rows(self, payload: VariableBuffer, full: bool) -> VariableBuffer:
        """The rows that somebody asks for, as they are now, unrounded if `full`; the payload is released."""
        wanted = split(payload.body, self._sizes, self._widths)
        payload.release()
        dtype = self.pool.dtype if full else self._replies.dtype
        return VariableBuffer(join(self._read_rows(wanted, dtype), self._sizes))

    def _read_rows(self, wanted: Sequence[Section], dtype: torch.dtype) -> list[Section]:
        found = []
        for section in wanted:
            assert section.slots is not None
            values = self.tables[section.table].read(section.slots).to(dtype)
            found.append(Section(What.ROWS, section.table, section.slots, values))
        return found

    # updates

    def add(self, worker: int, payload: Any, weight: float, share: float = 1.0) -> None:
        """As of any shard, of a push that `arrive` has taken apart."""
        number = len(self._weights)
        super().add(worker, payload.dense, weight, share)
        for section in payload.rows:
            self.tables[section.table].gather(number, section.slots, section.values, self._weights[-1])

    def mask(self, payload: Any, spans: list[tuple[int, int]]) -> Any:
        """As of any shard: the dense numbers without those in `spans`."""
        payload.dense = super().mask(payload.dense, spans)
        return payload

    def mask_rows(self, payload: Any, pieces: set[int]) -> None:
        """Leave out the rows of these old shards, by their number among those that this one was put together from."""
        kept = [self.tables[section.table].without_pieces(section, pieces) for section in payload.rows]
        payload.rows = [section for section in kept if section is not None]

    def _row_sums(self) -> list[torch.Tensor]:
        sums = [table.sum(len(self._weights)) for table in self.tables]
        return [one for one in sums if one is not None]

    def _sums(self) -> list[torch.Tensor]:
        return [*super()._sums(), *self._row_sums()]

    def _by_parameter(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return [*super()._by_parameter(gradient), *self._row_sums()]

    @contextlib.contextmanager
    def _tables_in_place(self) -> Iterator[None]:
        self._row_sums()
        for table in self.tables:
            table.begin_step(self.optimizer, self._num_updates)
        try:
            yield
        finally:
            self._num_updates += 1
            for table in self.tables:
                table.end_step(self.optimizer)

    # what is read

    def read(self, worker: int, full: bool = False, uses: int = 1) -> FixedBuffer | VariableBuffer:
        """The dense numbers with the rows that the worker wants; `full`: the dense numbers, unrounded."""
        dense = super().read(worker, full, uses)
        if full:
            return dense
        what = What.CODED if isinstance(dense, VariableBuffer) else What.DENSE
        sections = [
            Section(what, values=dense.body),
            *self._read_rows(self._wanted.get(worker, ()), self._replies.dtype),
        ]
        answer = VariableBuffer(join(sections, self._sizes))
        dense.release()
        return answer

    # checkpoints

    def state(self) -> dict[str, Any]:
        """As of any shard, with the tables by name."""
        state = super().state()
        known = len(self._parameters)
        of_slices = {key: value for key, value in state["optimizer"]["state"].items() if key < known}
        state["optimizer"]["state"] = of_slices
        tables = {table.name: table.state() for table in self.tables}
        return {**state, "tables": tables, "num_updates": self._num_updates}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, or from what `joined_tables` made of several."""
        begun = {table: dict(self.optimizer.state.get(table.parameter, {})) for table in self.tables}
        super().restore(state)
        self._wanted.clear()
        self._num_updates = state["num_updates"]
        for table, remembered in begun.items():
            if remembered:
                self.optimizer.state[table.parameter] = remembered
            table.restore(state["tables"][table.name])


def joined_tables(states: Sequence[dict[str, Any]], num_pieces: Sequence[int]) -> dict[str, Any]:
    """The tables of all shards of a checkpoint, and what else a shard with tables remembers; `num_pieces`: as for
    `joined_states`."""
    names = states[0].get("tables", {})
    tables = {name: joined_states([state["tables"][name] for state in states], num_pieces) for name in names}
    return {"tables": tables, "num_updates": max(state["num_updates"] for state in states)}
