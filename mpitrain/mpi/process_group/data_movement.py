"""The collectives of the process group that only move data: broadcast, allgather, gather, scatter, all-to-all."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.mpi.engine.collective_queue import Task, digest
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.process_group.base import MOVE_TAG, Call, GroupBase, as_list, check_dtype, shape_of
from mpitrain.mpi.process_group.work import MpiWork


class DataMovement(GroupBase):
    """Any dtype that travels, any layout."""

    def broadcast(self, tensors: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        """Copy the root's tensors to all ranks."""
        tensors, root = as_list(tensors), opts.rootRank
        events = buffers.record_events(tensors)
        is_root = self.rank() == root

        def carry(may_block: bool) -> Task:
            for tensor, event in zip(tensors, events):
                on_host = not may_block or self._payloads is not None
                held = buffers.lease(tensor, reads=is_root, writes=not is_root, after=event, on_host=on_host)
                if self._payloads is None:
                    for message in held.messages():
                        yield from self._call(may_block, "Bcast", message, root)
                elif is_root:
                    others = [rank for rank in range(self.size()) if rank != root]
                    yield [op for rank in others for op in self._send(held.memory.view(-1), rank, MOVE_TAG)]
                else:
                    yield self._receive(held.memory.view(-1), root, MOVE_TAG)
                held.finish()

        call = Call("broadcast", f"{shape_of(tensors)}, from {root}")
        board = self._board
        if board is None or len(tensors) != 1 or not board.holds(tensors[0].dtype, tensors[0].numel()):
            return self._collective(call, carry, tensors, opts, writes=not is_root)
        deposit, take = board.broadcasting(tensors[0], events[0], root)
        call = call._replace(deposit=deposit, short=not buffers.on_device(tensors[0]))
        return self._by_board(call, take, tensors, opts, writes=not is_root)

    # ---- allgather

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """outputs[i][r] becomes rank r's inputs[i]; the sizes may differ between ranks."""
        inputs = as_list(inputs)
        outputs = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        for slots, tensor in zip(outputs, inputs):
            check_dtype("allgather", slots, [tensor])
            if len(slots) != self.size() or slots[self.rank()].numel() != tensor.numel():
                raise ValueError(
                    f"allgather wants {self.size()} outputs, the one of rank {self.rank()} as long as the input"
                    f" ({tensor.numel()} elements); it got {shape_of(slots)}"
                )
        events = [buffers.record_events((own, *slots)) for own, slots in zip(inputs, outputs)]

        def carry(may_block: bool) -> Task:
            for slots, tensor, (event, *theirs) in zip(outputs, inputs, events):
                lent = buffers.lease(tensor, reads=True, writes=False, after=event, on_host=True)
                held = buffers.lease_all(slots, theirs, writes=True)
                yield from self._spread([each.memory.view(-1) for each in held], lent.memory.view(-1))
                for each in (lent, *held):
                    each.finish()

        what = "; ".join(shape_of(slots) for slots in outputs)
        return self._collective(Call("allgather", what), carry, outputs, opts, inputs=inputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> MpiWork:
        """outputs[r][i] becomes rank r's inputs[i]."""
        return self.allgather([list(slots) for slots in zip(*outputs)], list(inputs), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> MpiWork:
        """output, seen as `size` equal parts, becomes the concatenation of all ranks' input."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single  # torch's older name

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> MpiWork:
        """Several of them in one Work."""
        for output, own in zip(outputs, inputs):
            check_dtype("all_gather_single", [output], [own])
            if output.numel() != own.numel() * self.size():
                raise ValueError(f"output has {output.numel()} elements, wants {self.size()} x {own.numel()}")
        events = [buffers.record_events(pair) for pair in zip(outputs, inputs)]

        def carry(may_block: bool) -> Task:
            for output, own, (out_event, own_event) in zip(outputs, inputs, events):
                lent = buffers.lease(own, reads=True, writes=False, after=own_event, on_host=True)
                held = buffers.lease(output, reads=False, writes=True, after=out_event, on_host=True)
                if output.numel():
                    yield from self._gather_single(may_block, held.memory.view(-1), lent.memory.view(-1))
                lent.finish()
                held.finish()

        call = Call("all_gather_single", shape_of(outputs))
        return self._collective(call, carry, list(outputs), opts, inputs=inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment] # torch's older name

    def _gather_single(self, may_block: bool, whole: torch.Tensor, own: torch.Tensor) -> Task:
        slots = list(whole.view(self.size(), -1))
        if whole.numel() > buffers.MAX_COUNT or self._payloads is not None:
            yield from self._spread(slots, own)
            return
        slots[self.rank()].copy_(own)
        message = buffers.message_of(whole).blocks(self.size())
        yield from self._call(may_block, "Allgather", buffers.IN_PLACE, message)

    # ---- from and to one root

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        """On the root outputs[i][r] becomes rank r's inputs[i]; equal shapes."""
        (own,), root = as_list(inputs), opts.rootRank
        slots = list(outputs[0]) if outputs and self.rank() == root else []
        if self.rank() == root:
            self._check_slots("gather", slots, own)
        return self._root_moves("gather", own, slots, root, opts, to_root=True)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MpiWork:
        """On the root output, seen as `size` equal parts, becomes the concatenation of all ranks' input."""
        slots = []
        if self.rank() == opts.rootRank:
            if not output.is_contiguous() or output.numel() != input.numel() * self.size():
                raise ValueError(
                    f"gather_single wants a contiguous output of {self.size()} x {input.numel()} elements on the root;"
                    f" got {shape_of([output])}"
                )
            slots = [output.view(self.size(), *input.shape).unbind()]
        return self.gather(slots, [input], opts)

    gather_into_tensor = gather_single  # torch's older name

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        """outputs[i] becomes the root's inputs[i][this rank]; equal shapes."""
        (own,), root = as_list(outputs), opts.rootRank
        slots = list(inputs[0]) if inputs and self.rank() == root else []
        if self.rank() == root:
            self._check_slots("scatter", slots, own)
        return self._root_moves("scatter", own, slots, root, opts, to_root=False)

    def _check_slots(self, name: str, slots: list[torch.Tensor], own: torch.Tensor) -> None:
        fits = all(slot.numel() == own.numel() and slot.dtype == own.dtype for slot in slots)
        if len(slots) != self.size() or not fits:
            raise ValueError(
                f"{name} wants {self.size()} tensors on the root, each like {shape_of([own])}; got {shape_of(slots)}"
            )

    def _root_moves(
        self, name: str, own: torch.Tensor, slots: list[torch.Tensor], root: int, opts: object, to_root: bool
    ) -> MpiWork:
        events = buffers.record_events((own, *slots))

        def carry(may_block: bool) -> Task:
            mine = buffers.lease(own, reads=to_root, writes=not to_root, after=events[0], on_host=True)
            held = buffers.lease_all(slots, events[1:], writes=to_root)
            if held:
                flat = [each.memory.view(-1) for each in held]
                target, source = (flat[root], mine.memory) if to_root else (mine.memory, flat[root])
                target.view(-1).copy_(source.view(-1))
                move = self._receive if to_root else self._send
                yield [op for r in range(self.size()) if r != root for op in move(flat[r], r, MOVE_TAG)]
            else:
                yield (self._send if to_root else self._receive)(mine.memory.view(-1), root, MOVE_TAG)
            for each in (mine, *held):
                each.finish()

        result, inputs = ([slots], own) if to_root else ([own], slots)
        way = "to" if to_root else "from"
        call = Call(name, f"{shape_of([own])}, {way} {root}")
        return self._collective(call, carry, result, opts, inputs=inputs)

    # ---- all to all

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """outputs[r] becomes rank r's inputs[this rank]; all lengths may differ."""
        outputs, inputs = list(outputs), list(inputs)
        counts = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        events = buffers.record_events((*outputs, *inputs))

        def carry(may_block: bool) -> Task:
            yield from self._exchange(outputs, inputs, events)

        call = self._check_exchange("alltoall", counts, (*outputs, *inputs))
        return self._collective(call, carry, outputs, opts, inputs=inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: object = None,
    ) -> MpiWork:
        """The same on parts of one tensor each, cut along the first dimension (equally, if no sizes are given)."""
        out_rows = self._rows("output", output, output_split_sizes)
        in_rows = self._rows("input", input, input_split_sizes)
        counts = [_counts(output, out_rows), _counts(input, in_rows)]
        event, own_event = buffers.record_event(output), buffers.record_event(input)
        size = self.size()

        def carry(may_block: bool) -> Task | None:
            target, source = output.detach(), input.detach()
            if not may_block or self._payloads is not None:
                parts = [list(target.split(out_rows)), list(source.split(in_rows))]
                return self._exchange(parts[0], parts[1], [event] * size + [own_event] * size)
            received = target if target.is_contiguous() else torch.empty_like(target).contiguous()
            self._comm.Alltoallv(
                _cut_message(source.contiguous(), counts[1]), _cut_message(received, counts[0])
            )
            if received is not target:
                with torch.inference_mode():
                    target.copy_(received)
            return None

        blocks = not any(
            buffers.on_device(tensor) or tensor.numel() > buffers.MAX_COUNT for tensor in (output, input)
        )
        call = self._check_exchange("all_to_all_single", counts, (output, input), blocks)
        return self._collective(call, carry, output, opts, inputs=input)

    alltoall_base = all_to_all_single  # type: ignore[assignment] # torch's older name

    def _rows(self, name: str, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[int]:
        """How many rows of a tensor belong to each rank."""
        length = tensor.shape[0] if tensor.dim() else -1
        if sizes is None or not len(sizes):
            if length < 0 or length % self.size():
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} cannot be cut into {self.size()} equal parts"
                )
            sizes = [length // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != length:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} cannot be cut into {list(sizes)}")
        return list(sizes)

    def _check_exchange(
        self, name: str, counts: list[list[int]], tensors: Sequence[torch.Tensor], blocks: bool = True
    ) -> Call:
        """The call, with the balance of what goes to the others and comes from them; `counts`: of elements to be
        received from each rank, and to be sent to it."""
        size, me = self.size(), self.rank()
        received, sent = counts
        if len(received) != size or len(sent) != size or received[me] != sent[me]:
            raise ValueError(
                f"{name} wants {size} inputs and outputs, and what this rank sends itself to fit"
            )
        dtype = tensors[0].dtype
        if any(tensor.dtype != dtype for tensor in tensors):
            raise TypeError(f"{name} wants one dtype, got {shape_of(tensors)}")
        balance = _balance(me, tuple(received), tuple(sent))
        return Call(name, str(dtype).removeprefix("torch."), balance, blocks)

    def _exchange(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], events: Sequence[Any]
    ) -> Task:
        """Messages between any two ranks; the events are of the outputs, then of the inputs."""
        size, me = self.size(), self.rank()
        held = buffers.lease_all(outputs, events, writes=True)
        lent = buffers.lease_all(inputs, events[size:], writes=False)
        held[me].memory.view(-1).copy_(lent[me].memory.view(-1))
        ops = []
        for step in range(1, size):
            after, before = (me + step) % size, (me - step) % size
            ops += self._receive(held[before].memory.view(-1), before, MOVE_TAG)
            ops += self._send(lent[after].memory.view(-1), after, MOVE_TAG)
        yield ops
        for each in (*held, *lent):
            each.finish()


def _counts(tensor: torch.Tensor, rows: Sequence[int]) -> list[int]:
    width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [width * count for count in rows]


def _cut_message(memory: torch.Tensor, counts: Sequence[int]) -> buffers.Message:
    """A contiguous host tensor as parts of these lengths, one behind the other."""
    raw, _, datatype = message = buffers.as_buffer(memory)
    message[:] = [raw, (counts, [0, *itertools.accumulate(counts)][: len(counts)]), datatype]
    return message


@functools.lru_cache(maxsize=1024)
def _balance(me: int, received: tuple[int, ...], sent: tuple[int, ...]) -> int:
    """The hashes of what goes to each rank, minus those of what is to come from each (`collective_queue.py`)."""
    outward = sum(digest(f"{me}>{rank}: {count}") for rank, count in enumerate(sent))
    return outward - sum(digest(f"{rank}>{me}: {count}") for rank, count in enumerate(received))
