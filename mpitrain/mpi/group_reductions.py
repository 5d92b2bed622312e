"""The reducing collectives of the process group: allreduce, reduce, reduce-scatter, and their coalesced forms."""

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.mpi import buffers, direct
from mpitrain.mpi.group_core import GroupCore, as_list, shape_of
from mpitrain.mpi.lines import Task
from mpitrain.mpi.reduction import Reduction, is_sixteen
from mpitrain.mpi.work import MpiWork


class Reductions(GroupCore):
    """SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR where the dtype allows it, TypeError otherwise;
    bfloat16 and float16 are added in float32."""

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place."""
        tensors = as_list(tensors)
        wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
        marks = [buffers.mark(tensor) for tensor in tensors]

        def carry(calm: bool) -> Task:
            for tensor, reduction, mark in zip(tensors, wanted, marks):
                on_host = not calm or is_sixteen(tensor.dtype)
                held = buffers.lease(tensor, reads=True, writes=True, after=mark, on_host=on_host)
                yield from self._allreduce(calm, held, reduction)
                held.finish()

        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        return self._collective("allreduce", f"{shape_of(tensors)}, {kinds}", carry, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Several tensors in one Work."""
        return self.allreduce(tensors, opts)

    def _allreduce(self, calm: bool, held: buffers.Lease, reduction: Reduction) -> Task:
        memory = held.memory
        reduction.before(memory)
        if memory.numel() and is_sixteen(memory.dtype):
            yield from direct.allreduce(self, memory.view(-1), reduction)
            return
        for message in held.messages(reduction=True):
            yield from self._call(calm, "Allreduce", buffers.IN_PLACE, message, reduction.operation)
        reduction.after(memory, self.size())

    def reduce(self, tensors: Any, opts: Any) -> MpiWork:  # type: ignore[override]
        """The root's tensors become the reduction; the other ranks' keep their values."""
        tensors, root = as_list(tensors), opts.rootRank
        wanted = [Reduction.of(tensor.dtype, opts) for tensor in tensors]
        marks = [buffers.mark(tensor) for tensor in tensors]
        is_root = self.rank() == root

        def carry(calm: bool) -> Task:
            for tensor, reduction, mark in zip(tensors, wanted, marks):
                held = buffers.lease(tensor, reads=True, writes=is_root, after=mark, on_host=True)
                memory = held.memory.view(-1)
                if not is_root and reduction.factor is not None:
                    memory = memory.clone()
                reduction.before(memory)
                yield from self._reduce(calm, memory, root, reduction)
                held.finish()

        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        return self._collective("reduce", f"{shape_of(tensors)}, {kinds}, to {root}", carry, tensors, opts)

    def _reduce(self, calm: bool, memory: torch.Tensor, root: int, reduction: Reduction) -> Task:
        is_root = self.rank() == root
        if is_sixteen(memory.dtype):
            parts = direct.cut(memory, self.size())
            own = torch.empty_like(parts[self.rank()])
            if memory.numel():
                yield from direct.reduce_scatter(self, parts, own, reduction)
            if is_root:
                parts[root].copy_(own)
                yield [
                    op
                    for rank in range(self.size())
                    if rank != root
                    for op in self._receive(parts[rank], rank, direct.GATHER_TAG)
                ]
            else:
                yield self._send(own, root, direct.GATHER_TAG)
            return
        for piece in buffers.pieces(memory):
            message = buffers.message_of(piece, reduction=True)
            if is_root:
                yield from self._call(calm, "Reduce", buffers.IN_PLACE, message, reduction.operation, root)
            else:
                yield from self._call(calm, "Reduce", message, None, reduction.operation, root)
        if is_root:
            reduction.after(memory, self.size())

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> MpiWork:
        """outputs[i] becomes the reduction of all ranks' inputs[i][this rank]; lengths may differ between ranks."""
        outputs = as_list(outputs)
        inputs = [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
        for output, slots in zip(outputs, inputs):
            if len(slots) != self.size() or slots[self.rank()].numel() != output.numel():
                raise ValueError(
                    f"reduce_scatter wants {self.size()} inputs, the one of rank {self.rank()} as long as the output"
                    f" ({output.numel()} elements); it got {shape_of(slots)}"
                )
        what = "; ".join(shape_of(slots) for slots in inputs)
        return self._scatter_reduced("reduce_scatter", what, outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        """output becomes this rank's part of the reduction of all inputs, each seen as `size` equal parts."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        """torch's older name for reduce_scatter_single."""
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """Several of them in one Work."""
        for output, whole in zip(outputs, inputs):
            if whole.numel() != output.numel() * self.size():
                raise ValueError(
                    f"input has {whole.numel()} elements, wants {self.size()} x {output.numel()} (the output's)"
                )
        return self._scatter_reduced("reduce_scatter_single", shape_of(inputs), outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """torch's older name for reduce_scatter_single_coalesced."""
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def _scatter_reduced(
        self, name: str, what: str, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any
    ) -> MpiWork:
        wanted = [Reduction.of(output.dtype, opts) for output in outputs]
        marks = [
            [buffers.mark(tensor) for tensor in (output, *as_list(slots))]
            for output, slots in zip(outputs, inputs)
        ]

        def carry(calm: bool) -> Task:
            for output, slots, reduction, (mark, *theirs) in zip(outputs, inputs, wanted, marks):
                lent = [
                    buffers.lease(tensor, reads=True, writes=False, after=after, on_host=True)
                    for tensor, after in zip(as_list(slots), theirs)
                ]
                held = buffers.lease(output, reads=False, writes=True, after=mark, on_host=True)
                parts = [each.memory.view(-1) for each in lent]
                if isinstance(slots, torch.Tensor):
                    parts = (
                        list(parts[0].split(output.numel())) if output.numel() else [parts[0]] * self.size()
                    )
                yield from self._reduce_parts(calm, parts, held.memory.view(-1), reduction)
                for each in (*lent, held):
                    each.finish()

        kinds = "/".join(dict.fromkeys(reduction.kind for reduction in wanted))
        return self._collective(name, f"{what}, {kinds}", carry, list(outputs), opts)

    def _reduce_parts(
        self, calm: bool, parts: list[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> Task:
        if reduction.factor is not None:
            parts = [part.clone() for part in parts]  # the inputs are the user's
            for part in parts:
                reduction.before(part)
        yield from direct.reduce_scatter(self, parts, out, reduction)
