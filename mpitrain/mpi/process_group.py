"""torch.distributed over any MPI: the backend "mpi4py", a process group whose collectives run on one MPI thread.

The law of this file: a collective returns at once with a Work and is carried out by the process's
communication thread (`engine.py`), in the order in which it was issued, when all ranks have issued it; so
DDP's buckets travel while the rest of the backward pass computes. The bulk moves in blocking collectives (2
ranks, 16 MB: 4.4-5.0 ms, against 8 for Iallreduce). An error inside a collective is raised where its Work
or future is waited for.

Present: allreduce (also coalesced), broadcast, allgather, all_gather_single, barrier, send and recv: what
DDP needs. The other operations raise NotImplementedError. The group's `timeout` is honoured where Python
waits (`Work.wait`, so every synchronous call); DDP's own wait at the end of backward has none: there a rank
that never comes is waited for until the job ends, as it does when any rank raises.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from mpitrain.errors import UsageError
from mpitrain.mpi import buffers, reduction
from mpitrain.mpi.register import BACKEND, register
from mpitrain.mpi.runtime import Runtime, start
from mpitrain.mpi.work import MpiWork

if TYPE_CHECKING:
    from mpitrain.mpi.bindings import MPI
    from mpitrain.mpi.op import Op


def init_default_group(runtime: Runtime) -> None:
    """Make the default torch.distributed group of all ranks; from here on a communication thread owns MPI."""
    register()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=runtime.rank, world_size=runtime.size)


def rendezvous() -> dict[str, Any]:
    """What `init_process_group` needs to know, from MPI. Nothing of the group meets in the store."""
    runtime = start()
    return {"store": dist.HashStore(), "rank": runtime.rank, "world_size": runtime.size}


def create(options: Any, backend_options: Any = None) -> "MpiProcessGroup":
    """The creator that torch.distributed calls, on the members of a new group only."""
    runtime = start()
    ranks = list(options.global_ranks_in_group) or list(range(runtime.size))
    if options.group_size != len(ranks) or ranks[options.group_rank] != runtime.rank:
        raise UsageError(
            f"torch.distributed was told rank {options.group_rank} of {options.group_size}, but MPI started this"
            f" process as rank {runtime.rank} of {runtime.size}; leave rank and world_size out, or start all by mpirun"
        )
    return MpiProcessGroup(runtime, ranks, options.timeout)


class MpiProcessGroup(dist.ProcessGroup):
    """A process group over the given ranks of the world; made by torch.distributed through `create`."""

    def __init__(self, runtime: Runtime, ranks: Sequence[int], timeout: timedelta):
        super().__init__(ranks.index(runtime.rank), len(ranks))  # type: ignore[call-arg]
        self._runtime, self._timeout = runtime, timeout
        self._engine = runtime.engine
        self._name = self._desc = ""
        self._engine.start_thread()
        self._comm, self._gate = self._engine.run(lambda: self._make_comms(ranks))
        runtime.communicators += [self._comm, self._gate]

    def _make_comms(self, ranks: Sequence[int]) -> "tuple[MPI.Intracomm, MPI.Intracomm]":
        world = self._runtime.comm
        if len(ranks) == world.size:
            return world.Dup(), world.Dup()
        tag = (
            crc32(repr(list(ranks)).encode()) & 0x7FFF
        )  # only members call, so the same tag must come from the ranks
        group = world.group.Incl(list(ranks))
        comm = world.Create_group(group, tag)
        return comm, comm.Dup()

    # ---- what torch asks of every group

    def getBackendName(self) -> str:
        """ "mpi4py"."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name torch gave this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description torch gave this group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # ---- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place. SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR where the dtype
        allows it; bfloat16 and float16 are added in float32. TypeError otherwise."""
        kind = "SUM" if opts is None else opts.reduceOp.op.name
        for tensor in tensors:
            reduction.check(tensor.dtype, kind)
        marks = [buffers.mark(tensor) for tensor in tensors]

        def carry() -> None:
            for tensor, mark in zip(tensors, marks):
                on_host = reduction.is_sixteen(tensor.dtype)
                held = buffers.lease(tensor, reads=True, writes=True, after=mark, on_host=on_host)
                reduction.allreduce(self._comm, held, kind)
                held.finish()

        return self._work("allreduce", carry, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Several tensors in one Work."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:  # type: ignore[override]
        """Copy the root's tensors to all ranks."""
        root = opts.rootRank
        marks = [buffers.mark(tensor) for tensor in tensors]

        def carry() -> None:
            for tensor, mark in zip(tensors, marks):
                is_root = self.rank() == root
                held = buffers.lease(tensor, reads=is_root, writes=not is_root, after=mark)
                for message in held.messages():
                    self._comm.Bcast(message, root)
                held.finish()

        return self._work("broadcast", carry, tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        """outputs[i][r] becomes rank r's inputs[i]; the sizes may differ between ranks."""
        own = [slots[self.rank()] for slots in outputs]
        for slot, tensor in zip(own, inputs):
            slot.detach().copy_(tensor.detach())
        marks = [buffers.mark(slot) for slot in own]

        def carry() -> None:
            for slots, mark in zip(outputs, marks):
                self._fill(slots, mark)

        return self._work("allgather", carry, outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        """output, seen as `size` equal parts, becomes the concatenation of all ranks' input."""
        if output.numel() != input.numel() * self.size() or not output.is_contiguous():
            raise ValueError(
                f"output has {output.numel()} elements, wants {self.size()} x {input.numel()}, contiguous"
            )
        slots = list(output.detach().view(self.size(), -1))
        slots[self.rank()].copy_(input.detach().reshape(-1))
        mark = buffers.mark(output)

        def carry() -> None:
            if output.numel() > buffers.MAX_COUNT:
                self._fill(slots, mark)
                return
            held = buffers.lease(output, reads=True, writes=True, after=mark)
            for message in held.messages():  # one, or none for an empty tensor
                self._comm.Allgather(buffers.IN_PLACE, message.blocks(self.size()))
            held.finish()

        return self._work("all_gather_single", carry, output)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        """torch's older name for all_gather_single."""
        return self.all_gather_single(output, input, opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        """Done when all ranks have come here."""
        return self._work("barrier", lambda: None, [])

    def _fill(self, slots: Sequence[torch.Tensor], mark: Any) -> None:
        """Every rank broadcasts its slot: any sizes, any number of elements."""
        for root, slot in enumerate(slots):
            held = buffers.lease(slot, reads=root == self.rank(), writes=root != self.rank(), after=mark)
            for message in held.messages():
                self._comm.Bcast(message, root)
            held.finish()

    # ---- point to point

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> MpiWork:
        """Send one tensor to rank `dst` of this group."""
        (tensor,) = tensors
        return self._transfer(
            f"send to {dst}", tensor, True, lambda message: self._engine.isend(message, dst, tag, self._comm)
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> MpiWork:
        """Receive one tensor from rank `src` of this group."""
        (tensor,) = tensors
        return self._transfer(
            f"receive from {src}",
            tensor,
            False,
            lambda message: self._engine.irecv(message, src, tag, self._comm),
        )

    # ---- handing over to the communication thread

    def _transfer(
        self, what: str, tensor: torch.Tensor, outgoing: bool, post: "Callable[[Any], Op]"
    ) -> MpiWork:
        work = MpiWork(self._engine, what, [tensor], self._timeout)
        mark = buffers.mark(tensor)

        def begin() -> None:
            held = buffers.lease(tensor, reads=outgoing, writes=not outgoing, after=mark)
            message = held.messages()[0] if tensor.numel() else bytearray()
            post(message).then(lambda op: work.settle(op, held.finish))

        self._engine.call(begin).then(lambda op: work.end(op.error) if op.error else None)
        return work

    def _work(self, what: str, carry: Callable[[], None], result: Any) -> MpiWork:
        """The Work of a collective that runs when all ranks have arrived."""
        work = MpiWork(self._engine, what, result, self._timeout)
        self._engine.collective(carry, self._gate).then(work.settle)
        return work


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: MpiProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"the mpi4py backend does not have {name} yet: it has what DDP needs (allreduce, broadcast, allgather,"
            " all_gather_single, barrier, send, recv)"
        )

    refused.__name__ = name
    return refused


for _name in (
    "reduce", "gather", "scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "recv_anysource",
):  # fmt: skip
    setattr(MpiProcessGroup, _name, _refuse(_name))
