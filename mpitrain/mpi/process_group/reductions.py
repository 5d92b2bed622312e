"""The reducing collectives of the process group: allreduce, reduce, reduce-scatter, and their coalesced forms."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.process_group import algorithm_choice, allreduce_algorithms, profiled
from mpitrain.mpi.process_group.base import (
    Call,
    GroupBase,
    as_list,
    check_dtype,
    check_writable,
    shape_of,
    shape_text,
)
from mpitrain.mpi.process_group.reduce_ops import Reduction, is_sixteen
from mpitrain.mpi.process_group.sparse_allreduce import sparse_allreduce
from mpitrain.mpi.process_group.work import MpiWork

_FEW, _NUM_RECENT = 64, 64


@functools.lru_cache(maxsize=4096)
def _what(dtype: torch.dtype, count: int, kind: str) -> str:
    return f"{shape_text(((dtype, count),))}, {kind}"


class Reductions(GroupBase):
    """SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR where the dtype allows it, TypeError otherwise;
    bfloat16 and float16 are added in float32."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # DDP's join hands the Work of a small allreduce to C++, which keeps only the half of it that is C++'s own.
        self._recent: deque[MpiWork] = deque(maxlen=_NUM_RECENT)

    def allreduce(self, tensors: Any, opts: object = None) -> MpiWork:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place; sparse ones by SUM and AVG."""
        tensors = as_list(tensors)
        first = tensors[0] if len(tensors) == 1 else None
        if self.size() == 1 and not any(tensor.is_sparse for tensor in tensors):
            work = self._of_one_rank(tensors, opts)
        elif first is not None and self._is_plain(first):
            work = self._allreduce_one(first, tensors, opts)
        elif any(tensor.is_sparse for tensor in tensors):
            return self._collective(*sparse_allreduce(self, tensors, opts), tensors, opts)
        else:
            work = self._allreduce_all(tensors, opts, None)
        if first is not None and first.numel() <= _FEW:  # those of a larger one would be kept alive
            self._recent.append(work)
        return work

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: object = None) -> MpiWork:
        """Several tensors in one Work."""
        return self._allreduce_all(tensors, opts, None)

    def allreduce_on_wire(self, tensors: Any, wire: torch.dtype, opts: object = None) -> MpiWork:
        """allreduce of float32 tensors that travel as `wire` (bfloat16 or float16): half the bytes, sums in float32.
        Every contribution is rounded once, and the sum once; with several nodes of several ranks each node's sum, too.
        Not part of torch; `wire_hooks.py` hands it to DDP."""
        tensors = as_list(tensors)
        if not is_sixteen(wire) or any(tensor.dtype != torch.float32 for tensor in tensors):
            raise TypeError(
                f"a 16-bit wire carries float32 as bfloat16 or float16, not {shape_of(tensors)} as {wire}"
            )
        return self._allreduce_all(tensors, opts, wire)

    def _allreduce_one(self, tensor: torch.Tensor, result: list[torch.Tensor], opts: object) -> MpiWork:
        """The everyday case without the machinery, which costs more than a small allreduce itself."""
        reduction, board = Reduction.of(tensor.dtype, opts), self._board
        if board is not None and board.carries(tensor.dtype, tensor.numel(), reduction):
            deposit, add_up = board.of_plain(tensor, reduction)
            what = _what(tensor.dtype, tensor.numel(), reduction.kind)
            return self._by_board(
                Call("allreduce", what, deposit=deposit, short=True), add_up, result, opts, False
            )

        def at_once(may_block: bool) -> Task | None:
            if not may_block:
                return self._carried([tensor], [reduction], [None], None, False)
            memory = tensor.detach() if tensor.requires_grad else tensor
            reduction.before(memory)
            self._comm.Allreduce(buffers.IN_PLACE, buffers.of_plain(tensor), reduction.operation)
            if reduction.kind == "AVG":
                reduction.after(memory, self.size())
            return None

        what = _what(tensor.dtype, tensor.numel(), reduction.kind)
        if not getattr(opts, "asyncOp", True) and self._may_run_at_once():
            return self._at_once("allreduce", what, at_once, result, opts)
        # nothing in it overlaps
        return self._collective(Call("allreduce", what), at_once, result, opts, writes=False)

    def _of_one_rank(self, tensors: list[torch.Tensor], opts: object) -> MpiWork:
        """An allreduce among one: nothing travels, and a device tensor does not leave its device."""
        self._check_member("allreduce")
        check_writable("allreduce", tensors)
        wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
        span = profiled.begin("allreduce", tensors)
        work = self._work("allreduce", tensors, self._limit(opts), span)
        for tensor, reduction in zip(tensors, wanted, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                reduction.before(tensor)
                reduction.after(tensor, 1)
        work.end(None)
        self._num_collectives += 1
        return self._remember(work)

    def _allreduce_all(self, tensors: list[torch.Tensor], opts: object, wire: torch.dtype | None) -> MpiWork:
        wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
        events = buffers.record_events(tensors)
        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        way = "" if wire is None else f" as {str(wire).removeprefix('torch.')}"
        call = Call("allreduce", f"{shape_of(tensors)}{way}, {kinds}")

        def carry(may_block: bool) -> Task:
            return self._carried(tensors, wanted, events, wire, may_block)

        board = self._board
        if board is None or len(tensors) != 1:
            return self._collective(call, carry, tensors, opts)
        (tensor,), (reduction,) = tensors, wanted
        if not board.carries(wire or tensor.dtype, tensor.numel(), reduction):
            return self._collective(call, carry, tensors, opts)
        deposit, add_up = board.lending(tensor, events[0], reduction, wire or tensor.dtype)
        call = call._replace(deposit=deposit, short=not buffers.on_device(tensor))
        return self._by_board(call, add_up, tensors, opts)

    def _carried(
        self,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[Reduction],
        events: Sequence[Any],
        wire: torch.dtype | None,
        may_block: bool,
    ) -> Task:
        for tensor, reduction, event in zip(tensors, wanted, events):
            algorithm = yield from self._choose(may_block, tensor, wire)
            on_host = not may_block or algorithm != algorithm_choice.LIBRARY
            held = buffers.lease(tensor, reads=True, writes=True, after=event, on_host=on_host, adds=True)
            yield from self._allreduce(may_block, algorithm, held, reduction, wire)
            held.finish()

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether MPI can add this tensor where it lies, and the library is known to be the right algorithm."""
        return (
            len(self._nodes) == 1
            and self._setting in (algorithm_choice.AUTO, algorithm_choice.LIBRARY)
            and buffers.is_plain(tensor)
            and not is_sixteen(tensor.dtype)
        )

    def _choose(self, may_block: bool, tensor: torch.Tensor, wire: torch.dtype | None) -> Task:
        """The algorithm for this tensor; the first large message between nodes measures the network."""
        num_bytes = tensor.numel() * (wire or tensor.dtype).itemsize
        algorithm = yield from self._algorithm(may_block, num_bytes)
        if algorithm == algorithm_choice.LIBRARY and is_sixteen(wire or tensor.dtype):
            return algorithm_choice.DIRECT  # MPI adds no 16-bit floats
        return algorithm

    def _allreduce(
        self,
        may_block: bool,
        algorithm: str,
        held: buffers.Lease,
        reduction: Reduction,
        wire: torch.dtype | None,
    ) -> Task:
        memory = held.memory
        reduction.before(memory)
        if algorithm == algorithm_choice.LIBRARY:
            for message in held.messages(reduction=True):
                yield from self._call(may_block, "Allreduce", buffers.IN_PLACE, message, reduction.operation)
            reduction.after(memory, self.size())
        elif memory.numel():
            flat, finish = memory.view(-1), self._finish(reduction)
            if algorithm == algorithm_choice.HIERARCHICAL:
                yield from allreduce_algorithms.hierarchical(self, flat, reduction, finish, self._nodes, wire)
            else:
                yield from allreduce_algorithms.allreduce(self, flat, reduction, finish, wire=wire)

    def reduce(self, tensors: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        """The root's tensors become the reduction; the other ranks' keep their values."""
        tensors, root = as_list(tensors), opts.rootRank
        wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
        events = buffers.record_events(tensors)
        is_root = self.rank() == root

        def carry(may_block: bool) -> Task:
            for tensor, reduction, event in zip(tensors, wanted, events):
                held = buffers.lease(tensor, reads=True, writes=is_root, after=event, on_host=True)
                memory = held.memory.view(-1)
                if not is_root and reduction.factor is not None:
                    memory = memory.clone()
                reduction.before(memory)
                yield from self._reduce(may_block, memory, root, reduction)
                held.finish()

        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        what = f"{shape_of(tensors)}, {kinds}, to {root}"
        return self._collective(Call("reduce", what), carry, tensors, opts, writes=is_root)

    def _reduce(self, may_block: bool, memory: torch.Tensor, root: int, reduction: Reduction) -> Task:
        is_root = self.rank() == root
        if is_sixteen(memory.dtype):
            parts = allreduce_algorithms.cut(memory, self.size())
            own = torch.empty_like(parts[self.rank()])
            if memory.numel():
                finish = self._finish(reduction)
                yield from allreduce_algorithms.reduce_scatter(self, parts, own, reduction, finish)
            if is_root:
                parts[root].copy_(own)
                yield [
                    op
                    for rank in range(self.size())
                    if rank != root
                    for op in self._receive(parts[rank], rank, allreduce_algorithms.GATHER_TAG)
                ]
            else:
                yield self._send(own, root, allreduce_algorithms.GATHER_TAG)
            return
        for piece in buffers.pieces(memory):
            message = buffers.message_of(piece, reduction=True)
            if is_root:
                yield from self._call(
                    may_block, "Reduce", buffers.IN_PLACE, message, reduction.operation, root
                )
            else:
                yield from self._call(may_block, "Reduce", message, None, reduction.operation, root)
        if is_root:
            reduction.after(memory, self.size())

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> MpiWork:
        """outputs[i] becomes the reduction of all ranks' inputs[i][this rank]; lengths may differ between ranks."""
        outputs = as_list(outputs)
        inputs = [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
        for output, slots in zip(outputs, inputs):
            check_dtype("reduce_scatter", [output], slots)
            if len(slots) != self.size() or slots[self.rank()].numel() != output.numel():
                raise ValueError(
                    f"reduce_scatter wants {self.size()} inputs, the one of rank {self.rank()} as long as the output"
                    f" ({output.numel()} elements); it got {shape_of(slots)}"
                )
        what = "; ".join(shape_of(slots) for slots in inputs)
        return self._scatter_reduced("reduce_scatter", what, outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: object = None
    ) -> MpiWork:
        """output becomes this rank's part of the reduction of all inputs, each seen as `size` equal parts."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment] # torch's older name

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> MpiWork:
        """Several of them in one Work."""
        for output, whole in zip(outputs, inputs):
            check_dtype("reduce_scatter_single", [output], [whole])
            if whole.numel() != output.numel() * self.size():
                raise ValueError(
                    f"input has {whole.numel()} elements, wants {self.size()} x {output.numel()} (the output's)"
                )
        return self._scatter_reduced("reduce_scatter_single", shape_of(inputs), outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment] # torch's older name

    def _scatter_reduced(
        self, name: str, what: str, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: object
    ) -> MpiWork:
        wanted = [Reduction.of(output.dtype, opts) for output in outputs]
        events = [buffers.record_events((output, *as_list(slots))) for output, slots in zip(outputs, inputs)]

        def carry(may_block: bool) -> Task:
            for output, slots, reduction, (event, *theirs) in zip(outputs, inputs, wanted, events):
                lent = buffers.lease_all(as_list(slots), theirs, writes=False)
                held = buffers.lease(output, reads=False, writes=True, after=event, on_host=True)
                parts = [each.memory.view(-1) for each in lent]
                if isinstance(slots, torch.Tensor):
                    parts = (
                        list(parts[0].split(output.numel())) if output.numel() else [parts[0]] * self.size()
                    )
                yield from self._reduce_parts(may_block, parts, held.memory.view(-1), reduction)
                for each in (*lent, held):
                    each.finish()

        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        return self._collective(Call(name, f"{what}, {kinds}"), carry, list(outputs), opts, inputs=inputs)

    def _reduce_parts(
        self, may_block: bool, parts: list[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> Task:
        if reduction.factor is not None:
            parts = [part.clone() for part in parts]  # the inputs are the user's
            for part in parts:
                reduction.before(part)
        num_bytes = sum(part.numel() for part in parts) * out.element_size()
        algorithm = yield from self._algorithm(may_block, num_bytes)
        counts = [part.numel() for part in parts]
        if algorithm != algorithm_choice.LIBRARY or is_sixteen(out.dtype) or sum(counts) > buffers.MAX_COUNT:
            yield from allreduce_algorithms.reduce_scatter(
                self, parts, out, reduction, self._finish(reduction)
            )
            return
        whole = buffers.as_buffer(_joined(parts), reduction=True)
        target = buffers.as_buffer(out, reduction=True)
        yield from self._call(may_block, "Reduce_scatter", whole, target, counts, reduction.operation)
        reduction.after(out, self.size())

    def _finish(self, reduction: Reduction) -> allreduce_algorithms.Finish:
        return lambda total: reduction.after(total, self.size())


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts as one flat tensor: no copy where they already lie one behind the other in one memory."""
    start, end = parts[0].data_ptr(), parts[0].data_ptr()
    for part in parts:
        if (
            part.data_ptr() != end
            or part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr()
        ):
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,)) if end > start else parts[0]
