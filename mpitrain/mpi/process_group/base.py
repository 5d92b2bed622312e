"""What every operation of the process group needs: communicators, the queue of collectives, and the way to a Work.

Invariants: an operation returns a Work at once and is carried out as a Task by the thread that owns MPI, in the order
of submission within the group. A group has two communicators: `_control_comm` carries arrivals and the heads of
messages, `_comm` the collectives and the bodies of messages. The constructor is local; `start()` makes them.
"""

import contextlib
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from mpitrain.errors import MismatchError
from mpitrain.mpi.allreduce_plan import Transport
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import LEFT_GROUP, Announcement, Task
from mpitrain.mpi.faults.errors import is_lost_peer
from mpitrain.mpi.faults.regroup import Regroup
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group import algorithm_choice, on_board, profiled
from mpitrain.mpi.process_group.work import MpiWork
from mpitrain.mpi.runtime import Runtime
from mpitrain.system import background, trace
from mpitrain.torch_versions import internal_overlap

MOVE_TAG = 4  # on a group's communicator
MEETING_TAG = 3  # on the world's communicator, whose other messages have other tags
LEAVE_S = 5.0  # for ranks that leave the group later
_MOST_ANNOUNCEMENTS = 256  # kept: a program's tensors may have ever new lengths
MOST_COPIES = 16  # of tensors under way, to whose senders they are gone
_PROBE_TAG, _PROBE_BYTES, _NUM_PROBES = 5, 1 << 18, 4
_NO_TIME = timedelta(0)


class Call(NamedTuple):
    """A collective as its ranks must call it: all give the same `what`, and their `balance` adds up to nothing.
    `blocks`, `deposit`, `short`: as for the engine."""

    name: str
    what: str = ""
    balance: int = 0
    blocks: bool = True
    deposit: Callable[[], None] | None = None
    short: bool = False


class GroupBase(dist.ProcessGroup):
    """A group over the given ranks of the world (in the order of their ranks in the group)."""

    def __init__(self, runtime: Runtime, ranks: Sequence[int], timeout: timedelta):
        super().__init__(ranks.index(runtime.rank), len(ranks))  # type: ignore[call-arg]
        self._runtime, self._timeout = runtime, timeout
        self._engine = runtime.engine
        self._bodies = itertools.count()  # of long messages
        self._heads: list[bytearray] = []  # of messages that have been taken in: for those to come
        self._copies: deque[Op] = deque(maxlen=MOST_COPIES)  # sends to which nobody waits, the oldest first
        self._consist_of(ranks)
        self._has_left = False
        self._failure: BaseException | None = None  # after which this group carries nothing more
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        self._num_collectives = 0
        self._announcements: dict[str, Announcement] = {}
        self._board: on_board.TensorBoard | None = None
        self._payloads = runtime.payloads
        self._done_work = MpiWork(self._engine, "a collective that is done", [], timeout)
        self._done_work.end(None)
        self._comm: MPI.Intracomm = MPI.COMM_NULL  # type: ignore[assignment]
        self._control_comm: MPI.Intracomm = MPI.COMM_NULL  # type: ignore[assignment]

    def _consist_of(self, ranks: Sequence[int]) -> None:
        """These are the group's ranks, as the world's."""
        self._rank, self._size, self._ranks = ranks.index(self._runtime.rank), len(ranks), list(ranks)
        by_node: dict[int, list[int]] = {}
        for own_rank, rank in enumerate(ranks):
            by_node.setdefault(self._runtime.nodes[rank], []).append(own_rank)
        self._nodes = list(by_node.values())  # the group's ranks, node by node
        self._layout = [
            [ranks[own_rank] for own_rank in node] for node in self._nodes
        ]  # as the world's ranks
        self.decide()

    def decide(self) -> None:
        """Carry allreduces as the run's plan has it now."""
        plan = self._runtime.allreduce_plan
        self._setting, self._transport = plan.setting(), plan.known(self._layout)

    def rank(self) -> int:
        """This rank's, in the group."""
        return self._rank  # torch's own answer comes from C++ by way of Python, and takes two microseconds

    def size(self) -> int:
        """How many ranks are in the group."""
        return self._size

    # ---- communicators

    def start(self, name: str = "") -> None:
        """Collective over the members: from here on the communication thread owns MPI, and the group has its
        communicators. `name`: torch's, which no other group of theirs has."""
        self._runtime.start_thread()
        if self._runtime.regroups:
            runtime = self._runtime
            maker = Regroup(self._engine, runtime.comm, runtime.processes, self._ranks, f"group {name}")
            self._comm, self._control_comm = self._engine.run(lambda: maker.make(self._timeout_s()))
        else:
            self._engine.run(lambda: self._meet())
            self._comm, self._control_comm = self._engine.run(self._make_comms)
            self._engine.run(self._put_up_board)
        self._runtime.communicators += [self._comm, self._control_comm]
        self._runtime.groups.append(self)

    def _meet(self) -> Task:
        """Done when every member is here (dissemination barrier): making a communicator blocks, and a member that comes
        late must keep no other from driving what is under way."""
        size, me, distance = self.size(), self.rank(), 1
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

    def _make_comms(self) -> tuple[MPI.Intracomm, MPI.Intracomm]:
        world = self._runtime.comm
        if self._ranks == list(range(world.size)):
            comm = world.Dup()
        else:  # only members call, so the same tag must come from the ranks
            comm = world.Create_group(
                world.group.Incl(self._ranks), crc32(repr(self._ranks).encode()) & 0x7FFF
            )
        return comm, comm.Dup()

    def shutdown(self) -> None:
        """Leave the group and wait, for LEAVE_S at most, until all have left: a program that calls mpi4py itself after
        its last collective is then the only thread inside MPI."""
        if (op := self.leave()) is not None:
            with contextlib.suppress(TimeoutError):
                self._engine.wait_any(lambda: op.done, LEAVE_S)

    def _put_up_board(self) -> None:
        """Collective, in the thread that owns MPI: have the members arrive on a board where that can be."""
        made = on_board.make(self._runtime, self._comm, self._ranks)
        if made is not None:
            board, peers, carries_any = made
            queue = self._engine.boards.use(self._control_comm, self._comm, board, peers)
            self._board = on_board.TensorBoard(board, queue, self._rank, self._size, carries_any)

    def leave(self) -> Op | None:
        """Leave the group; returns at once, the first time with an Op that is done when all have left, and the group's
        communicators are freed. A rank that is still in a collective of this group, or calls one, gets a MismatchError
        that names the ranks that have left."""
        self._has_left = True
        if self not in self._runtime.groups:
            return None
        self._runtime.groups.remove(self)
        return self._engine.submit_collective(lambda may_block: self._free(), self._control_comm, LEFT_GROUP)

    def _free(self) -> None:
        self._engine.forget([self._control_comm, self._comm])
        for comm in (self._comm, self._control_comm):
            self._runtime.communicators.remove(comm)
            comm.Free()

    def abort(self) -> None:
        """Leave without waiting for any rank, after the hooks have been called."""
        self._call_abort_hooks()
        self.leave()

    # ---- failures

    def _fail(self, error: BaseException) -> None:
        """In any thread: a collective has failed."""
        if isinstance(error, TimeoutError) or LEFT_GROUP in str(error) or is_lost_peer(error):
            self._give_up(error)

    def _fail_transfer(self, error: BaseException) -> None:
        """In any thread: a message has failed. Others may travel yet where it only came too late."""
        if is_lost_peer(error):
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """This group carries nothing more; the first time its hooks are called."""
        if self._failure is None:
            self._failure = error
            if self._abort_hooks:
                background.start("abort hooks", self._call_abort_hooks)  # they may wait for ranks

    def _call_abort_hooks(self) -> None:
        for hook in tuple(self._abort_hooks.values()):
            hook()

    def _timeout_s(self) -> float:
        return self._timeout.total_seconds()

    # ---- handing over to the thread that owns MPI

    def _collective(
        self,
        call: Call,
        carry: Callable[[bool], Task | None],
        result: Any,
        opts: object = None,
        writes: bool = True,
        inputs: Any = None,
    ) -> MpiWork:
        """The Work of a collective. `writes`: it writes `result`, which is a tensor or lists of them, as `inputs` are,
        where they are not the same."""
        name, what, balance, blocks, deposit, short = call
        self._check_member(name)
        if writes:
            check_writable(name, result)
        timeout = self._limit(opts)
        span = profiled.begin(name, result if inputs is None else inputs)
        work = self._work(name, result, timeout, span)
        text = self._text(name, what)
        quiet = not getattr(opts, "asyncOp", True)  # torch waits for it next
        limit_s = timeout.total_seconds()
        try:
            op = self._engine.submit_collective(
                lambda may_block: in_inference_mode(carry(may_block)),
                self._control_comm, text, balance, limit_s, quiet, blocks, deposit, short,
            )  # fmt: skip
        except BaseException:
            profiled.end(span)
            raise
        self._num_collectives += 1
        if (land := trace.flight(name, what=what)) is not None:
            op.then(land)
        op.then(work.settle)
        return self._remember(work)

    def _work(self, name: str, result: Any, timeout: timedelta, span: object = None) -> MpiWork:
        """The Work of a collective of this group, not yet carried out."""
        return MpiWork(self._engine, name, result, timeout, span, self._fail)

    def _may_run_at_once(self) -> bool:
        """Whether nobody looks at single collectives, and this group may begin one."""
        return not (self._has_left or profiled.is_on() or trace.is_on()) and len(self._ranks) > 1

    def _at_once(
        self, name: str, what: str, carry: Callable[[bool], Task | None], result: Any, opts: object
    ) -> MpiWork:
        """`_collective` for one that its caller waits for, without the objects that cost more than a small collective
        itself: as a rule it is done when this returns."""
        made = self._announcements.pop(what, None)
        if made is None:
            made = Announcement(self._text(name, what), len(self._ranks))
        try:
            op = self._engine.at_once.run(
                made,
                lambda may_block: in_inference_mode(carry(may_block)),
                self._control_comm,
                lambda: self._limit(opts).total_seconds(),
            )
        except Exception as error:
            self._fail(error)
            raise
        if op is True:
            self._num_collectives += 1
            if len(self._announcements) >= _MOST_ANNOUNCEMENTS:
                self._announcements.clear()
            self._announcements[what] = made
            return self._done_work
        if op is False:
            return self._collective(Call(name, what), carry, result, opts, writes=False)
        self._num_collectives += 1
        work = self._work(name, result, self._limit(opts))
        op.then(work.settle)
        return self._remember(work)

    def _by_board(
        self,
        call: Call,
        finish: Callable[[bool], None],
        result: Any,
        opts: object,
        writes: bool = True,
    ) -> MpiWork:
        """`_collective` for one with a deposit, which this thread leaves on the board, and ends where it comes last,
        if the call is short."""
        board, name, what = self._board, call.name, call.what
        if board is None or not call.short or not self._may_run_at_once():
            return self._collective(call, finish, result, opts, writes)
        if writes:
            check_writable(name, result)
        made = self._announcements.get(what) or self._announce(name, what)
        waits = not getattr(opts, "asyncOp", True)
        op: Op | bool
        error = None
        try:
            op = self._engine.boards.step(
                board.queue, made, call.deposit, finish, lambda: self._limit(opts).total_seconds(), waits
            )
        except Exception as failure:
            op, error = True, failure
        if op is False:
            return self._collective(call, finish, result, opts, writes)
        self._num_collectives += 1
        if op is True and error is None and waits:
            return self._done_work
        work = self._work(name, result, self._limit(opts))
        if isinstance(op, Op):
            op.then(work.settle)
        else:
            work.end(error)
        return self._remember(work)

    def _announce(self, name: str, what: str) -> Announcement:
        """The announcement of a call, kept: one that only a board reads."""
        if len(self._announcements) >= _MOST_ANNOUNCEMENTS:
            self._announcements.clear()
        made = self._announcements[what] = Announcement(self._text(name, what), len(self._ranks))
        return made

    def _text(self, name: str, what: str) -> str:
        return f"{name}({what})" + (f" by {self._setting}" if self._setting != algorithm_choice.AUTO else "")

    def _check_member(self, name: str) -> None:
        if self._has_left:
            raise RuntimeError(
                f"{name}: rank {self.rank()} has left this process group (destroy_process_group); make a new one"
            )

    def _remember(self, work: MpiWork) -> MpiWork:
        return work

    def _limit(self, opts: object) -> timedelta:
        """The timeout of one call: its own where the options name one, the group's otherwise."""
        own = getattr(opts, "timeout", None)
        return own if isinstance(own, timedelta) and own > _NO_TIME else self._timeout

    def _call(self, may_block: bool, name: str, *arguments: object) -> Task:
        """One of the library's own collectives: blocking where that is allowed, nonblocking otherwise."""
        if may_block:
            getattr(self._comm, name)(*arguments)
            return
        start = getattr(self._comm, "I" + name.lower())
        yield (self._engine.nonblocking(lambda: start(*arguments), arguments, self._comm),)

    def _algorithm(self, may_block: bool, num_bytes: int) -> Generator[Iterable[Op], None, str]:
        """The algorithm for a message of this size, the same on all ranks (`algorithm_choice.py`)."""
        if self._transport is None and algorithm_choice.needs_measuring(
            num_bytes, self._nodes, self._setting
        ):
            self._transport = self._runtime.allreduce_plan.known(self._layout)
            if self._transport is None:
                self._transport = yield from self._measure(may_block)
                self._runtime.allreduce_plan.learn(self._layout, self._transport)
        return algorithm_choice.choose(num_bytes, self._nodes, self._transport, self._setting)

    def _measure(self, may_block: bool) -> Generator[Iterable[Op], None, Transport]:
        """Collective: the Transport between the nodes, agreed by all; about 1 MB from node to node, in a ring."""
        leaders = [node[0] for node in self._nodes]
        times_s = np.zeros(2)
        if self.rank() in leaders:
            own = leaders.index(self.rank())
            after, before = leaders[(own + 1) % len(leaders)], leaders[own - 1]
            for which, num_bytes in enumerate((8, _PROBE_BYTES)):
                sent, got = (
                    torch.zeros(num_bytes, dtype=torch.uint8),
                    torch.empty(num_bytes, dtype=torch.uint8),
                )
                best_s = math.inf
                for _ in range(_NUM_PROBES):
                    began_s = time.perf_counter()
                    yield self._receive(got, before, _PROBE_TAG) + self._send(sent, after, _PROBE_TAG)
                    best_s = min(best_s, time.perf_counter() - began_s)
                times_s[which] = best_s
        agreed_s = np.empty_like(times_s)
        yield from self._call(may_block, "Allreduce", times_s, agreed_s, MPI.MAX)
        latency_s, probe_s = (float(each_s) for each_s in agreed_s)
        return Transport(latency_s, _PROBE_BYTES / max(probe_s - latency_s, 1e-9))

    def _segment_bytes(self) -> int:
        """How long the messages of our own algorithms are, the same on all ranks."""
        return algorithm_choice.segment_bytes(self._transport)

    def transport(self) -> dict[str, Any]:
        """Collective: which algorithms carry this group's allreduces, and what was measured (JSON values)."""
        work = self._collective(
            Call("transport"),
            lambda may_block: self._algorithm(may_block, algorithm_choice.MEASURE_FROM_BYTES),
            [],
        )
        work.wait()
        return algorithm_choice.describe(self._nodes, self._transport, self._setting)

    def _spread(self, slots: list[torch.Tensor], own: torch.Tensor) -> Task:
        """slots[r] becomes rank r's `own`: around the ring, each rank passing on what it has just received."""
        size, me = self.size(), self.rank()
        slots[me].copy_(own)
        after, before = (me + 1) % size, (me - 1) % size
        for step in range(size - 1):
            sends = self._send(slots[(me - step) % size], after, MOVE_TAG)
            yield sends + self._receive(slots[(me - step - 1) % size], before, MOVE_TAG)

    def _send(self, memory: torch.Tensor, dest: int, tag: int) -> list[Op]:
        """Send host memory of any size to a rank of the group, inside a Task."""
        return [
            self._engine.isend(buffers.message_of(piece), dest, tag, self._comm)
            for piece in buffers.pieces(memory)
        ] + (self._payloads.sent(self, memory, dest, tag) if self._payloads is not None else [])

    def _receive(self, memory: torch.Tensor, source: int, tag: int) -> list[Op]:
        """Receive into host memory of any size from a rank of the group, inside a Task."""
        ops = [
            self._engine.irecv(buffers.message_of(piece), source, tag, self._comm)
            for piece in buffers.pieces(memory)
        ]
        return ops if self._payloads is None else self._payloads.received(self, ops, memory, source, tag)


def in_inference_mode(task: Task | None) -> Task | None:
    """The task, with every step in inference mode, where no autograd is in the way: tensors that were made in it may be
    written in it only, and a task runs in whichever thread drives MPI."""
    return None if task is None else _stepwise(task)


def _stepwise(task: Task) -> Task:
    error: BaseException | None = None
    while True:
        try:
            with torch.inference_mode():
                waited = task.send(None) if error is None else task.throw(error)
        except StopIteration as end:
            return end.value
        try:
            error = None
            yield waited
        except BaseException as failure:
            error = failure


def check_writable(name: str, tensors: Any) -> None:
    """Raises ValueError for a tensor (in lists of any depth) of which several elements lie in one place."""
    if not isinstance(tensors, torch.Tensor):
        for each in tensors:
            check_writable(name, each)
    elif not tensors.is_sparse and internal_overlap(tensors) == 1:
        raise ValueError(
            f"{name} cannot write a tensor of shape {tuple(tensors.shape)} and strides {tensors.stride()}, of which"
            " several elements lie in one place; give it a copy (.contiguous())"
        )


def check_dtype(name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Raises TypeError where outputs and inputs are not all of one dtype."""
    if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
        raise TypeError(
            f"{name} converts nothing: the input is {shape_of(inputs)}, the output {shape_of(outputs)}"
        )


def shape_of(tensors: Iterable[torch.Tensor]) -> str:
    """ "float32[3, 5]": dtype and number of elements of tensors that have one dtype, as compared between ranks."""
    return shape_text(tuple((tensor.dtype, tensor.numel()) for tensor in tensors))


@functools.lru_cache(maxsize=4096)
def shape_text(tensors: tuple[tuple[torch.dtype, int], ...]) -> str:
    """`shape_of` tensors with these dtypes and numbers of elements."""
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype, _ in tensors)
    return f"{'/'.join(dtypes)}[{', '.join(str(count) for _, count in tensors)}]"


def as_list(tensors: Any) -> list[Any]:
    """torch's own groups take one tensor as well as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
