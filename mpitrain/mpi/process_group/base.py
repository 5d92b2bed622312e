"""What every operation of the process group stands on: communicators, the line, and the way to a Work.

The law of this file: an operation returns a Work at once and is carried out as a Task by the thread that owns MPI, in
the order of submission within the group. Two communicators a group: `_gate` carries arrivals and the heads of
messages, `_comm` the collectives and the bodies of messages.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist

from mpitrain.errors import MismatchError
from mpitrain.mpi.engine.collective_queue import LEFT, Task
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group import algorithm_choice
from mpitrain.mpi.process_group.work import MpiWork
from mpitrain.mpi.runtime import Runtime

if TYPE_CHECKING:
    from mpitrain.mpi.bindings import MPI

MEETING_TAG = 3  # on the world's communicator, whose other messages have other tags


class GroupCore(dist.ProcessGroup):
    """A group over the given ranks of the world (in the order of their ranks in the group)."""

    def __init__(self, runtime: Runtime, ranks: Sequence[int], timeout: timedelta):
        super().__init__(ranks.index(runtime.rank), len(ranks))  # type: ignore[call-arg]
        self._runtime, self._timeout, self._ranks = runtime, timeout, list(ranks)
        self._engine = runtime.engine
        self._num_bodies = 0
        self._told = runtime.allreduce_plan.setting()
        where: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            where.setdefault(runtime.nodes[rank], []).append(place)
        self._nodes = list(where.values())  # the group's ranks, node by node
        self._layout = [[ranks[place] for place in node] for node in self._nodes]  # as the world's ranks
        self._transport = runtime.allreduce_plan.known(self._layout)
        self._engine.start_thread()
        self._engine.run(lambda: self._meet())
        self._comm, self._gate = self._engine.run(self._make_comms)
        runtime.communicators += [self._comm, self._gate]
        runtime.groups.append(self)

    # ---- communicators

    def _meet(self) -> Task:
        """Done when every member is here (dissemination barrier): making a communicator blocks, and nobody may be kept
        from driving what is under way by one who comes late."""
        size, me, distance = len(self._ranks), self.rank(), 1
        world = self._runtime.comm
        while distance < size:
            token = bytearray(4)
            after, before = self._ranks[(me + distance) % size], self._ranks[(me - distance) % size]
            yield (
                self._engine.isend(self._token(), after, MEETING_TAG, world),
                self._engine.irecv(token, before, MEETING_TAG, world, timeout_s=self._timeout_s()),
            )
            if token != self._token():
                raise MismatchError(
                    f"rank {before} makes another group now than this rank, whose group is ranks {self._ranks}; call "
                    "new_group on all ranks in the same order"
                )
            distance *= 2

    def _token(self) -> bytes:
        return crc32(repr(self._ranks).encode()).to_bytes(4, "little")

    def _make_comms(self) -> "tuple[MPI.Intracomm, MPI.Intracomm]":
        world = self._runtime.comm
        if self._ranks == list(range(world.size)):
            comm = world.Dup()
        else:  # only members call, so the same tag must come from the ranks
            comm = world.Create_group(
                world.group.Incl(self._ranks), crc32(repr(self._ranks).encode()) & 0x7FFF
            )
        return comm, comm.Dup()

    def shutdown(self) -> None:
        """Leave the group; returns at once. Its communicators are freed when all have left. A rank that is still in a
        collective of this group, or comes to one, gets a MismatchError that says who has left."""
        if self in self._runtime.groups:
            self._runtime.groups.remove(self)
            self._engine.line_up(lambda calm: self._free(), self._gate, LEFT)

    def _free(self) -> None:
        self._engine.forget(self._gate)
        for comm in (self._comm, self._gate):
            self._runtime.communicators.remove(comm)
            comm.Free()

    def abort(self) -> None:
        """Leave without waiting for anybody."""
        self.shutdown()

    def _timeout_s(self) -> float:
        return self._timeout.total_seconds()

    # ---- handing over to the thread that owns MPI

    def _collective(
        self,
        name: str,
        what: str,
        carry: Callable[[bool], Task | None],
        result: Any,
        opts: Any = None,
        balance: int = 0,
    ) -> MpiWork:
        """The Work of a collective whose ranks must all say the same `what`."""
        timeout = self._limit(opts)
        work = MpiWork(self._engine, name, result, timeout)
        text = f"{name}({what})" + (f" by {self._told}" if self._told != algorithm_choice.AUTO else "")
        quiet = not getattr(opts, "asyncOp", True)  # torch waits for it next
        op = self._engine.line_up(carry, self._gate, text, balance, timeout.total_seconds(), quiet)
        op.then(work.settle)
        return self._remember(work)

    def _remember(self, work: MpiWork) -> MpiWork:
        return work

    def _limit(self, opts: Any) -> timedelta:
        """The timeout of one call: its own where the options name one, the group's otherwise."""
        own = getattr(opts, "timeout", None)
        return own if isinstance(own, timedelta) and own > timedelta(0) else self._timeout

    def _call(self, calm: bool, name: str, *arguments: Any) -> Task:
        """One of the library's own collectives: blocking where that is allowed, nonblocking otherwise."""
        if calm:
            getattr(self._comm, name)(*arguments)
            return
        start = getattr(self._comm, "I" + name.lower())
        yield (self._engine.nonblocking(lambda: start(*arguments), arguments),)

    def _algorithm(self, calm: bool, num_bytes: int) -> Generator[Iterable[Op], None, str]:
        """The algorithm for a message of this size, the same on all ranks (`choice.py`)."""
        if self._transport is None and algorithm_choice.needs_measuring(num_bytes, self._nodes, self._told):
            self._transport = self._runtime.allreduce_plan.known(self._layout)
            if self._transport is None:
                self._transport = yield from algorithm_choice.measure(self, self._nodes, calm)
                self._runtime.allreduce_plan.learn(self._layout, self._transport)
        return algorithm_choice.choose(num_bytes, self._nodes, self._transport, self._told)

    def _segment_bytes(self) -> int:
        """How our own algorithms cut what they send, the same on all ranks."""
        return algorithm_choice.segment_bytes(self._transport)

    def transport(self) -> dict[str, Any]:
        """Collective: how this group's allreduces travel, with what was measured (JSON values)."""
        work = self._collective(
            "transport", "", lambda calm: self._algorithm(calm, algorithm_choice.MEASURE_FROM_BYTES), []
        )
        work.wait()
        return algorithm_choice.describe(self._nodes, self._transport, self._told)

    def _send(self, memory: torch.Tensor, dest: int, tag: int) -> list[Op]:
        """Send host memory of any size to a rank of the group, inside a Task."""
        return [
            self._engine.isend(buffers.message_of(piece), dest, tag, self._comm)
            for piece in buffers.pieces(memory)
        ]

    def _receive(self, memory: torch.Tensor, source: int, tag: int) -> list[Op]:
        """Receive into host memory of any size from a rank of the group, inside a Task."""
        return [
            self._engine.irecv(buffers.message_of(piece), source, tag, self._comm)
            for piece in buffers.pieces(memory)
        ]


def shape_of(tensors: Iterable[torch.Tensor]) -> str:
    """ "float32[3, 5]": dtype and number of elements of tensors that have one dtype, as compared between ranks."""
    return _shape_text(tuple((tensor.dtype, tensor.numel()) for tensor in tensors))


@functools.lru_cache(maxsize=4096)
def _shape_text(tensors: tuple[tuple[torch.dtype, int], ...]) -> str:
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype, _ in tensors)
    return f"{'/'.join(dtypes)}[{', '.join(str(count) for _, count in tensors)}]"


def as_list(tensors: Any) -> list[Any]:
    """torch's own groups take one tensor as well as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
