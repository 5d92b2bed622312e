"""The trainable parameters as one flat vector, cut into contiguous shards.

Invariants: the order of the vector is the order of the optimizer's parameter groups, so every shard is
at most one slice per group and a server's optimizer keeps the groups intact. The layout is a pure function of
names, shapes and the number of shards: all ranks compute the same.

A model that takes part keeps its parameters *in* the shards' wire buffers (each is a view), so what arrives from a
server is in the model without a copy. Only a parameter that straddles two shards, is not contiguous, or is narrower
than the buffer, keeps storage of its own and is copied. Tables are no part of the vector (`embedding/`), and where
workers all-reduce the dense parameters nothing is.

Parameters in 16 bits are updated in float32 (`wire/masters.py`): servers hold the whole vector in float32. A model of
one 16-bit dtype travels in it, and its wire buffers are of it unless an optimizer steps it here; a model of several
dtypes travels in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.devices import accelerator
from mpitrain.embedding.lookups import Lookups
from mpitrain.embedding.tables import check_tables, tables_of
from mpitrain.errors import UsageError
from mpitrain.model.in_place import InPlaceGuard
from mpitrain.model.wire.buffers import BufferPool, FixedBuffer, VariableBuffer, wire_dtype
from mpitrain.model.wire.masters import SIXTEEN, Masters


@dataclass(frozen=True)
class Layout:
    """Where everything is in the flat vector, in elements.

    names, shapes, starts: of each parameter; group_ends: where each parameter group ends; cuts: shard i is
    [cuts[i], cuts[i + 1]); dtype: of updates and sums; wire_dtype: in which all of it travels, where nothing says
    otherwise.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    group_ends: tuple[int, ...]
    cuts: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype

    @property
    def num_shards(self) -> int:
        """One a server."""
        return len(self.cuts) - 1

    def cut_into(self, num_shards: int) -> Layout:
        """The same vector in another number of shards."""
        total = self.cuts[-1]
        return dataclasses.replace(self, cuts=tuple(total * i // num_shards for i in range(num_shards + 1)))

    def size(self, shard: int) -> int:
        """Elements of a shard."""
        return self.cuts[shard + 1] - self.cuts[shard]

    def group_slices(self, shard: int) -> list[tuple[int, int, int]]:
        """(group, start, stop) of every parameter group's share of a shard, relative to the shard."""
        low, high = self.cuts[shard], self.cuts[shard + 1]
        begins = (0, *self.group_ends[:-1])
        shares = [
            (group, max(low, b), min(high, e))
            for group, (b, e) in enumerate(zip(begins, self.group_ends, strict=True))
        ]
        return [(group, start - low, stop - low) for group, start, stop in shares if start < stop]

    def pieces(self, shard: int) -> list[tuple[int, int, int, int]]:
        """(parameter, start and stop inside the parameter, start inside the shard) of everything in a
        shard.
        """
        low, high = self.cuts[shard], self.cuts[shard + 1]
        found = []
        for index, (start, shape) in enumerate(zip(self.starts, self.shapes, strict=True)):
            first, last = max(low, start), min(high, start + _numel(shape))
            if first < last:
                found.append((index, first - start, last - start, first - low))
        return found


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def trainable(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter, int]]:
    """(name, parameter, group) of what the optimizer updates, in the order of its groups.

    Raises:
        UsageError: a parameter that is not the module's, or nothing to train.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = []
    for group, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not in the model"
                )
            if parameter.requires_grad:
                found.append((names[id(parameter)], parameter, group))
    if not found:
        raise UsageError("the optimizer holds no parameter that requires a gradient: nothing to train")
    return found


def make_layout(
    module: nn.Module, optimizer: Optimizer, num_shards: int, reduces: bool = False, strategy: str = "servers"
) -> Layout:
    """The layout of `module`'s trainable parameters but its tables' over `num_shards` balanced shards (sizes differ by
    at most one element); of none where workers all-reduce the others (`reduces`). `strategy`: for messages.

    Raises:
        UsageError: more shards than elements, tables that servers cannot hold, no table where they hold nothing else,
            or dtypes that are not for the wire.
    """
    tables = tables_of(module)
    apart, trained = {id(table.parameter) for table in tables}, trainable(module, optimizer)
    entries = [entry for entry in trained if id(entry[1]) not in apart]
    dtype, travels = _dtypes(entries or trained, bool(tables), strategy)
    if reduces:
        entries = []
        if not tables:
            raise UsageError(
                "hybrid: servers hold rows of tables, and this model has no layer whose rows are to be there: use "
                'allreduce(), or hybrid(tables="servers") where it has layers with sparse=True'
            )
    shapes = tuple(tuple(parameter.shape) for _, parameter, _ in entries)
    ends, total = [], 0
    for shape in shapes:
        total += _numel(shape)
        ends.append(total)
    check_tables(module, tables, [parameter for _, parameter, _ in trained], dtype)
    if num_shards > total and not tables:
        raise UsageError(f"{num_shards} servers for {total} parameters: use at most {total}")
    group_ends = []
    for group in range(len(optimizer.param_groups)):
        group_ends.append(
            max((end for end, entry in zip(ends, entries, strict=True) if entry[2] <= group), default=0)
        )
    cuts = tuple(total * shard // num_shards for shard in range(num_shards + 1))
    starts = (0, *ends[:-1])
    names = tuple(name for name, _, _ in entries)
    return Layout(names, shapes, starts[: len(names)], tuple(group_ends), cuts, dtype, travels)


def _dtypes(
    trained: list[tuple[str, nn.Parameter, int]], has_tables: bool, strategy: str
) -> tuple[torch.dtype, torch.dtype]:
    """In which a model is updated, and in which it travels."""
    dtypes = {parameter.dtype: name for name, parameter, _ in trained}
    kinds = set(dtypes)
    if kinds == {torch.float64}:
        return torch.float64, torch.float64
    if kinds <= {torch.float32, *SIXTEEN} and not (has_tables and kinds & set(SIXTEEN)):
        return torch.float32, kinds.pop() if len(kinds) == 1 else torch.float32
    listed = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in dtypes.items())
    if has_tables and kinds <= {torch.float32, *SIXTEEN}:
        raise UsageError(
            f"{strategy}: beside tables on servers all parameters are float32, or all float64, and {listed}: make the "
            'model with float32 ones, which precision="bfloat16" computes with in 16 bits'
        )
    raise UsageError(
        f"{strategy}: trains parameters of float32, bfloat16 and float16, or all of float64, and {listed}: convert "
        "them, or use allreduce(), under which torch's own optimizer steps them as they are"
    )


@dataclass(frozen=True)
class Wires:
    """What travels between a model and its servers.

    Args:
        push, reply: as in `ServerStrategy`: what gradients are rounded to in their wire buffers, and what parameters
            arrive as.
        replies_apart: answers are received into wire buffers of their own, because the model is in use while they
            arrive, or because they are not its parameters.
        pushes_coded, replies_coded: they are messages of a codec.
    """

    push: str = "full"
    reply: str = "full"
    replies_apart: bool = False
    pushes_coded: bool = False
    replies_coded: bool = False


class FlatModel:
    """A module whose trainable parameters live in one wire buffer a shard.

    Args:
        module: its parameters' values are kept; their storage moves into the wire buffers (host memory only: a
            model on a device keeps its own storage and is copied to and from pinned wire buffers).
        wires: between the model and the servers.
        reduces: workers all-reduce the dense parameters, which are in no wire buffer.
        steps: an optimizer steps the parameters here: where they are in 16 bits, wire buffers hold their masters.
        strategy: for messages.
        in_place_lost: why what a pass changes of parameters in place is not kept; empty where it is.

    Attributes:
        parameters: in the wire buffers; reduced: those that workers all-reduce.
        in_place: looks at what passes change of them.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        num_shards: int,
        wires: Wires = Wires(),
        reduces: bool = False,
        in_place_lost: str = "",
        steps: bool = False,
        strategy: str = "servers",
    ):
        self.module, self.replies_coded = module, wires.replies_coded
        self.layout = layout = make_layout(module, optimizer, num_shards, reduces, strategy)
        tables = tables_of(module)
        of_tables = {id(table.parameter) for table in tables}
        named = [(name, parameter) for name, parameter, _ in trainable(module, optimizer)]
        every = [parameter for _, parameter in named]
        dense = [parameter for parameter in every if id(parameter) not in of_tables]
        kept = [(name, parameter) for name, parameter in named if id(parameter) not in of_tables]
        self.in_place = InPlaceGuard(kept, in_place_lost)
        self.parameters, self.reduced = ([], dense) if reduces else (dense, [])
        self.device = every[0].device
        self.lookups = Lookups(tables, num_shards, self.device, layout.dtype) if tables else None
        self._masters = Masters(self.parameters if steps else [], optimizer)
        pin = accelerator.pins(self.device)
        sizes, full = [layout.size(shard) for shard in range(num_shards)], layout.wire_dtype
        dtype = layout.dtype if steps else full
        self.wire_buffers = [FixedBuffer(size, dtype, pin=pin) for size in sizes]
        reply_dtype = wire_dtype(wires.reply, full)
        apart = wires.replies_apart or reply_dtype != dtype
        self._replies = (
            [FixedBuffer(size, reply_dtype, pin=pin) for size in sizes] if apart else self.wire_buffers
        )
        push_dtype = layout.dtype if wires.pushes_coded else wire_dtype(wires.push, full)
        self._pools = [BufferPool(size, push_dtype, pin) for size in sizes]
        self._copied: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in sizes]
        self._rounded: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in sizes]
        for shard in range(num_shards):
            for index, start, stop, at in self.layout.pieces(shard):
                self._place(shard, self.parameters[index], start, stop, at)

    @torch.no_grad()
    def gradients(self) -> list[torch.Tensor]:
        """What backward has left on the parameters, and on rows of tables."""
        return [owner.grad for owner in self.owners() if owner.grad is not None]

    def owners(self) -> list[torch.Tensor]:
        """What backward leaves gradients on."""
        rows = self.lookups.present if self.lookups is not None else None
        return [*self.parameters, *self.reduced, *(rows.leaves() if rows is not None else ())]

    def _place(self, shard: int, parameter: nn.Parameter, start: int, stop: int, at: int) -> None:
        home = self.wire_buffers[shard].body[at : at + stop - start]
        home.copy_(parameter.detach().reshape(-1)[start:stop])
        held = self._masters.of(parameter)
        is_whole = stop - start == held.numel() and held.is_contiguous()
        if self.device.type == "cpu" and is_whole and held.dtype == home.dtype:
            held.data = home.view(held.shape)
        else:
            self._copied[shard].append((_flat(held)[start:stop], home))
        if held is not parameter:
            self._rounded[shard].append((_flat(parameter)[start:stop], home))

    def install(self, shard: int, source: FixedBuffer | None = None) -> None:
        """Make the module use what stands in `source` (default: the shard's own wire buffer, where most of it
        already is).
        """
        wire_buffer = self.wire_buffers[shard]
        if source is not None and source is not wire_buffer:
            wire_buffer.body.copy_(source.body)
        for target, home in (*self._copied[shard], *self._rounded[shard]):
            target.copy_(home, non_blocking=True)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """For as long as the context lasts the parameters are what an optimizer is to step, or to be restored with."""
        return self._masters.stepping() if self._masters else contextlib.nullcontext()

    def buffer_for(self, shard: int, final: bool) -> FixedBuffer | VariableBuffer:
        """Where the next parameters of a shard are to be received; the final ones come unrounded."""
        if (self.replies_coded or self.lookups is not None) and not final:
            return VariableBuffer()
        buffer = (self.wire_buffers if final else self._replies)[shard]
        if final and buffer.body.dtype != self.layout.wire_dtype:
            return FixedBuffer(self.layout.size(shard), self.layout.wire_dtype)
        buffer.rewrite()
        return buffer.hold()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the wire buffers hold what the parameters hold, after somebody wrote into the parameters."""
        if self._masters:
            self._masters.take_up()
        for pairs in self._copied:
            for source, home in pairs:
                home.copy_(source)

    def current(self) -> list[FixedBuffer]:
        """The wire buffers, holding what the parameters hold now."""
        self.refresh()
        return self.wire_buffers

    def push_buffers(self) -> list[FixedBuffer]:
        """Frames of the shards' sizes that nobody else holds, for gradients."""
        return [pool.take() for pool in self._pools]

    def gather_gradients(self, wire_buffers: list[FixedBuffer]) -> bool:
        """Copy every gradient into the wire buffers (a missing one counts as zero); returns whether all of it is
        finite.
        """
        targets, sources, missing = [], [], []
        for shard, wire_buffer in enumerate(wire_buffers):
            for index, start, stop, at in self.layout.pieces(shard):
                gradient = self.parameters[index].grad
                target = wire_buffer.body[at : at + stop - start]
                if gradient is None:
                    missing.append(target)
                else:
                    targets.append(target)
                    sources.append(gradient.reshape(-1)[start:stop])
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if missing:
            torch._foreach_zero_(missing)
        accelerator.wait_for_stream(self.device)
        return all_finite([wire_buffer.body for wire_buffer in wire_buffers])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()
    return tensor.data.view(-1)


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether no tensor, of any number, holds a NaN or an infinity: one pass, and a second only where a square
    overflows."""
    if not tensors or bool(torch.isfinite(torch.stack(torch._foreach_norm(tensors))).all()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
