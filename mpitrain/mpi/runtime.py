"""One MPI process: who it is among the others, what all ranks agree on, how it ends in order.

Invariants: every collective waits for the slowest rank in the progress engine, not inside MPI, so signals are seen and
no core is wasted; and all ranks call the same collectives in the same order. `bindings.py` says how MPI is started,
`faults/abort.py` how a job ends after an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from mpitrain import torch_versions
from mpitrain.errors import UsageError
from mpitrain.mpi import json_collectives, json_messages
from mpitrain.mpi.allreduce_plan import Plan
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine import doorbell
from mpitrain.mpi.engine.board import MAX_RANKS
from mpitrain.mpi.engine.doorbell import Doorbell, NodePeers, Place
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.failed_ranks import failed_ranks
from mpitrain.mpi.faults import abort, under_slurm
from mpitrain.mpi.faults.errors import is_lost_peer
from mpitrain.mpi.faults.level import asks_for_heartbeat, asks_for_ulfm, why_not_asked_level
from mpitrain.mpi.faults.self_destruct import self_destruct
from mpitrain.mpi.thread_level import check_second_thread, thread_level, warn_of_multiple
from mpitrain.system import processes
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.launch_variables import are_shared, node_key, own_cores, why_another_job
from mpitrain.system.launched.node_map import node_indices
from mpitrain.system.launched.ranks import Ranks
from mpitrain.system.memory import ask_torch_for_huge_pages
from mpitrain.system.saying import flush, tell

# Where MPI reports no deaths: the longest wait for others at a collective, and of rank 0 for the last counts of a rank.
PATIENCE_S, LIVING_S = 900.0, 120.0
LEFTOVER_S = 5.0  # for messages that are on their way when all ranks have come to their end
_runtime: Runtime | None = None


def start() -> Runtime:
    """This process's runtime, made and connected on the first call, which is collective over all ranks.

    Sets exception hooks that end the whole job and an orderly end at exit.

    Raises:
        UsageError: the launcher has started other ranks than MPI knows of.
    """
    global _runtime
    if _runtime is None:
        if why_not := why_another_job(MPI.COMM_WORLD.size):
            raise UsageError(why_not)
        ask_torch_for_huge_pages()
        runtime = Runtime()
        runtime.connect()
        if runtime.rank == 0 and (line := torch_versions.untried()):
            tell(f"mpitrain: warning: {line}")
        _runtime = runtime
    return _runtime


def start_group(ranks_per_group: int) -> Runtime:
    """Collective over all ranks: a runtime of this rank's group, ranks 0 to K-1, K to 2K-1 and so on. From here on
    `start()` returns it, so that what trains here trains among the ranks of the group.

    The runtime of all ranks stays beside it. One of them is used at a time: a collective of the other one is called
    where no communication thread runs, as between two runs. Local ranks stay those of the launch: they choose devices.
    """
    global _runtime
    whole = start()
    color, key = divmod(whole.rank, ranks_per_group)
    comm = whole.collective(lambda: whole.comm.Split(color, key), "split into groups")
    group = Runtime(comm)
    group.connect()
    group.local_rank = whole.local_rank
    _runtime = group
    return group


def start_part(members: Sequence[int]) -> Runtime:
    """Collective over these ranks of MPI's world alone, in this order: a runtime of theirs, which `start()` returns
    from here on. The others may do what they like, but MPI ends on all ranks together."""
    global _runtime
    world = MPI.COMM_WORLD
    tag = zlib.crc32(repr(list(members)).encode()) & 0x7FFF
    part = Runtime(world.Create_group(world.group.Incl(list(members)), tag))
    part.connect()
    atexit.register(part.finish)
    _runtime = part
    return part


def started() -> Runtime | None:
    """This process's runtime, if it has one."""
    return _runtime


def end_group(whole: Runtime, group: Runtime) -> None:
    """From here on `start()` returns the runtime of all ranks again."""
    global _runtime
    group.engine.stop()
    _runtime = whole


def exclusive_mpi() -> contextlib.AbstractContextManager[None]:
    """For your own mpi4py calls while collectives of torch.distributed or of this package are under way:
    `with mpitrain.exclusive_mpi(): comm.Barrier()`.

    Waits for those that this process has begun, and keeps the thread that carries them out of MPI until the end of the
    block: MPI is started for one thread at a time (MPI_THREAD_SERIALIZED). All ranks that take part in a blocking call
    inside enter such a block. Collectives of torch inside it are carried by this thread. It may be nested, and does
    nothing where this package has not started. Raises what the engine broke with, if it has.
    """
    return contextlib.nullcontext() if _runtime is None else _runtime.engine.exclusive()


class Group(Protocol):
    """A process group, as this file and whoever settles on algorithms see it."""

    def size(self) -> int: ...
    def transport(self) -> dict[str, Any]: ...
    def decide(self) -> None: ...
    def leave(self) -> Any: ...


class Runtime(Ranks):
    """This process among the others; made by `start()` only.

    `comm` (a duplicate of COMM_WORLD with errors returned as exceptions), `rank`, `size`; `nodes[r]` is the index of
    the node of rank r, `num_nodes`, `local_rank` (this rank among those of its node); `library`, `thread_level`,
    `fault_tolerance` ("ulfm", "heartbeat" or "none"); `engine`, the process's only progress engine. The code that runs
    a role keeps `role` and `step` up to date and sets `run_dir`: errors are reported with them. Where ranks have died
    and the others continue (`faults/shrink.py`), ranks are renumbered; `launched[r]` is the rank at launch of what is
    rank r now, and what users see.

    The constructor declares every attribute and sends nothing; `connect()` meets the other ranks: all that MPI has
    started, or those of `comm`, a part of them.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        among: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
        super().__init__(among.rank, among.size)
        self._pid = os.getpid()
        self._is_part = comm is not None
        self.exit_code = 0  # of the process, where it cannot end by itself
        # Who it is among the others.
        self.comm: MPI.Intracomm = among
        self._control_comm: MPI.Intracomm = self.comm
        self.communicators: list[MPI.Comm] = []  # more to revoke when the job ends under ULFM
        self.torch_ranks: tuple[int, ...] = ()  # torch's ranks as MPI's, once there is a process group
        self.groups: list[Group] = []  # process groups that this rank has not left
        self.some_have_groups = False  # and others none, as all of them know
        self.regroups = False  # ranks may be dead, and groups of the living are made (`faults/regroup.py`)
        # What this MPI and this launch can do.
        self.may_miss_from_any = False
        self.library = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
        self.allreduce_plan = Plan(self.nodes, self.library)
        self.thread_level = thread_level()
        self._thread_levels = [self.thread_level]  # of every rank at launch
        self._has_checked_threads = False
        self.shares_cores = False  # this node has more ranks than cores that they may run on
        self.neighbours: NodePeers | None = None  # the other ranks of this node, where all ring each other
        self.fault_tolerance = fault_tolerance()
        self._patience_s = PATIENCE_S if self.fault_tolerance == "heartbeat" else None
        self.engine = Engine(
            self.comm, ulfm=self.fault_tolerance == "ulfm", tolerant=self.fault_tolerance != "none"
        )

    def connect(self) -> None:
        """Collective over all ranks: make the communicators, learn who the others are, and agree to start."""
        try:
            # A duplicate would have the program's own attributes and hints, too.
            world: Any = self.comm
            self.comm = self.engine.comm = world.Create(world.group)
            self.comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises what MPI returns
            self._make_control_comm()
        except MPI.Exception as error:
            if not is_lost_peer(error):
                raise
            abort.leave_start(self.comm, error)
        self.engine.on_wait = self.stamp_waiting
        abort.install_hooks(self)
        if not self._is_part:
            atexit.register(self.finish)
        why_not, bell = why_not_asked_level(self.library, can_report_deaths()), None
        try:
            bell = doorbell.own()
        except UsageError as error:
            why_not = str(error)
        who = [node_key(), socket.gethostname(), processes.identity(), self.thread_level, own_cores()]
        node_keys, self.hosts, self.processes, self._thread_levels, cores, places, no_ulfm = map(
            list, zip(*self.allgather([*who, bell and bell.memory.place, under_slurm.why_not()]))
        )
        self._place(node_keys)
        self.shares_cores = are_shared([cores[rank] for rank in self._ranks_here()])
        self.may_miss_from_any = may_miss_from_any(self.library, self.nodes)
        self.engine.listens_to_each |= self.may_miss_from_any
        if self.rank == 0:
            warn_of_multiple(self._thread_levels, self.library)
        self.allreduce_plan = Plan(self.nodes, self.library)
        self.local_rank = self.nodes[: self.rank].count(self.nodes[self.rank])
        self._meet_neighbours(bell, places)
        if any(no_ulfm):
            why_not = self._tell_level(no_ulfm) or why_not
        self.agree(UsageError(why_not) if why_not else None)
        self._start_reporting()

    def _tell_level(self, no_ulfm: list[str]) -> str:
        """Warn that this launch has not the level that was asked for, which all ranks know by these texts of theirs;
        returns what is wrong where some ranks have it."""
        rank = next(rank for rank, text in enumerate(no_ulfm) if text)
        reason = f"rank {rank} on host {self.hosts[rank]}: {no_ulfm[rank]}"
        if not all(no_ulfm):
            return (
                f"some ranks of this launch have ulfm and some have not ({reason}): leave --ft out, or have a C "
                "compiler on all nodes"
            )
        if self.rank == 0:
            tell(f"mpitrain: warning: this launch is `restart`, not `ulfm`: a death ends it ({reason})")
        return ""

    def renumber(self, comm: MPI.Intracomm, survivors: list[int]) -> None:
        """Collective over `comm`, which holds the ranks `survivors` in this order: go on among them only. The
        local rank stays: it may stand for a GPU in use."""
        self.lost |= {launched for rank, launched in enumerate(self.launched) if rank not in survivors}
        self.launched = [self.launched[rank] for rank in survivors]
        self.processes = [self.processes[rank] for rank in survivors]
        self.hosts = [self.hosts[rank] for rank in survivors]
        self._place([str(self.nodes[rank]) for rank in survivors])
        self.allreduce_plan.renumber(self.nodes)
        self.engine.forget([self.comm])
        self.comm = self.engine.comm = comm
        if self.neighbours is not None:
            self.neighbours = self.neighbours.among(survivors)
            self.engine.use_bell(self.neighbours, self.shares_cores)
        self.rank, self.size = comm.rank, comm.size
        self.torch_ranks, self.communicators, self.groups = (), [], []
        self._make_control_comm()

    def _ranks_here(self) -> list[int]:
        """The ranks of this node."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    def _meet_neighbours(self, bell: Doorbell | None, places: list[Any]) -> None:
        """Collective: have the ranks of this node ring each other, where each of them can ring all others."""
        here = self._ranks_here()
        if bell is not None and 1 < len(here) <= MAX_RANKS and all(places[rank] for rank in here):
            bell.number = self.local_rank
            others = {rank: Place(*places[rank]) for rank in here if rank != self.rank}
            with contextlib.suppress(OSError):
                self.neighbours = NodePeers.at(bell, others)
        if len(set(self.nodes)) < self.size:
            can_ring = self.allgather(self.neighbours is not None)
            if not all(can_ring[rank] for rank in here):
                self.neighbours = None
        if bell is not None:
            bell.memory.close()
        if self.neighbours is not None:
            self.engine.use_bell(self.neighbours, self.shares_cores)

    def _place(self, node_names: list[str]) -> None:
        self.nodes = node_indices(node_names)
        self.num_nodes = max(self.nodes) + 1

    def _make_control_comm(self) -> None:
        """Collective: a communicator for the arrivals at collectives, beside a new `comm`."""
        self._control_comm = self.comm.Dup()
        self.communicators.append(self._control_comm)

    def all_communicators(self) -> Iterator[MPI.Comm]:
        """Every communicator of this job that a rank may wait in; read where it is iterated, in the thread that frees
        them."""
        yield self.comm
        yield from tuple(self.communicators)

    @property
    def arriving(self) -> bool:
        return self.engine.arriving

    def start_thread(self) -> None:
        """Have a communication thread own MPI, if there is none; the first time with a warning or a UsageError where
        MPI was started for one thread (`thread_level.py`)."""
        if not self._has_checked_threads:
            self._has_checked_threads = True
            check_second_thread(self._thread_levels, self.library, warns=self.rank == 0)
        self.engine.start_thread()

    # ---- collectives: every rank calls them, in the same order

    def collective(self, function: Callable[[], Any], what: str) -> Any:
        """Run the blocking collective `function()` when every rank has arrived here; returns its result.

        Raises:
            MismatchError: on every rank, where another one has arrived with another `what`.
        """
        op = self.engine.submit_collective(
            lambda may_block: function(), self._control_comm, what, timeout_s=self._patience_s
        )
        self.engine.wait(op)
        return op.result

    def barrier(self) -> None:
        """Return when every rank has arrived here."""
        self.collective(lambda: None, "barrier")

    def broadcast(self, value: object, root: int = 0) -> Any:
        """The JSON value of `root` on every rank; the other ranks' argument is ignored."""
        return self.collective(
            lambda: json_collectives.broadcast(self.comm, value, root), f"broadcast from rank {root}"
        )

    def gather(self, value: object) -> list[Any] | None:
        """The JSON values of all ranks in rank order, on rank 0; None elsewhere."""
        values: list[Any] | None = self.collective(
            lambda: json_collectives.gather(self.comm, value), "gather"
        )
        return values

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks in rank order, on rank 0; None elsewhere."""
        gathered: list[bytes] | None = self.collective(
            lambda: json_collectives.gather_bytes(self.comm, data), "gather bytes"
        )
        return gathered

    def gather_living(self, value: object, wait_s: float = 10.0) -> dict[int, Any] | None:
        """The JSON values of all ranks that still answer, by rank, on rank 0; None elsewhere. Messages, no collective:
        a dead rank is left out at once, an evicted one after `wait_s`, and both are in `evicted` then."""
        living_s = None
        if self.fault_tolerance == "heartbeat":
            wait_s, living_s = 1.0, LIVING_S  # most evicted ranks are dead
        return json_messages.gather(self.engine, self.rank, self.size, value, self.evicted, wait_s, living_s)

    def broadcast_living(self, value: object) -> Any:
        """Rank 0's JSON value on every rank that still answers."""
        return json_messages.broadcast(
            self.engine, self.rank, self.size, value, self.evicted, self._patience_s
        )

    def allgather(self, value: object) -> list[Any]:
        """The JSON values of all ranks in rank order, on every rank."""
        values: list[Any] = self.collective(lambda: json_collectives.allgather(self.comm, value), "allgather")
        return values

    def from_first_of_node(self, value: object) -> Any:
        return json_messages.from_first_of_node(self.engine, self.rank, self.nodes, value, self._patience_s)

    def largest(self, own: Sequence[int], what: str) -> list[int]:
        found: list[int] = self.collective(lambda: json_collectives.largest(self.comm, own), what)
        return found

    def broadcast_tensors(self, tensors: Sequence[Any], root: int = 0) -> None:
        from mpitrain.mpi.process_group.broadcast import broadcast_tensors

        broadcast_tensors(self, tensors, root)

    # ---- what carries roles

    def make_world(
        self, peers: Sequence[int], buffer_for: Callable[[int, Any], Any], **options: object
    ) -> Any:
        from mpitrain.mpi.traced_world import make_world

        return make_world(self.engine, tuple(peers), buffer_for, **options)

    def sum_among(self, ranks: Sequence[int]) -> Any:
        from mpitrain.mpi.workers_sum import WorkersSum

        return WorkersSum(self, ranks)

    def fail(self, how: str, after_s: float = 0.0) -> None:
        self_destruct(how, after_s)

    def _start_reporting(self) -> None:
        """MPI is started; from here on the launch is informed whether this rank waits and makes progress."""
        reporter = rank_status.begin()
        if reporter is not None:
            reporter.observe = lambda: (self.waits, self.progress_s, self._step)
            reporter.looks = self.local_rank == 0
            reporter.reach(rank_status.STARTED)

    # ---- the end

    def dead(self) -> set[int]:
        """Ranks that MPI knows to have failed; empty where MPI does not report deaths."""
        return failed_ranks(self.comm) if self.fault_tolerance == "ulfm" else set()

    def end_job(self, error: BaseException) -> NoReturn:
        """Report `error` with rank, role and step, and end the whole job with its exit code (`abort.py`)."""
        abort.end_job(self, error)

    def finish(self) -> None:
        """The orderly end: finish what is under way, wait for every rank, finalize MPI. Safe to call twice."""
        if MPI.Is_finalized() or os.getpid() != self._pid:  # a forked child leaves MPI to its parent
            return
        rank_status.reach(rank_status.ENDED, self.exit_code)
        if self.evicted or self.lost:
            abort.end_without_finalize(self)
        had_groups = self.some_have_groups or bool(self.groups)
        for group in list(self.groups):
            group.leave()
        try:
            if had_groups:
                self._finish_groups()
            self.engine.stop(self._patience_s)
            self.barrier()
            if self.fault_tolerance == "ulfm" and under_slurm.hangs_in_finalize():
                under_slurm.leave()
                flush(sys.stdout)
                os._exit(self.exit_code)
            MPI.Finalize()
            under_slurm.leave()
        except Exception as error:
            late = self.fault_tolerance == "heartbeat" and isinstance(error, TimeoutError)
            if not late and (self.fault_tolerance != "ulfm" or not is_lost_peer(error)):
                raise
            flush(sys.stdout)  # a rank died after its last message; Finalize would hang one time in four
            os._exit(self.exit_code)

    def _finish_groups(self) -> None:
        """Once every rank is here, nothing new is sent or received: what is then left of the process groups' messages
        is waited for a moment, since it may be on its way, and is an error otherwise."""
        self.barrier()
        try:
            self.engine.stop(LEFTOVER_S)
        except TimeoutError:
            left = ", ".join(sorted({f"a {op.kind} {op.way}" for op in self.engine.outstanding}))
            abort.end_job(
                self,
                UsageError(
                    f"the program has ended on all ranks, but rank {self.rank} has messages under way that no rank has "
                    f"asked for: {left}; receive them, or wait for their Works"
                ),
            )


def fault_tolerance() -> str:
    """ "ulfm" if this launch survives failures and this MPI reports them, "heartbeat" if the launch survives them and
    MPI reports nothing."""
    if asks_for_ulfm() and can_report_deaths() and not under_slurm.why_not():
        return "ulfm"
    return "heartbeat" if asks_for_heartbeat() else "none"


def can_report_deaths() -> bool:
    """Whether this MPI has the calls of ULFM; whether the launch has made them act is asked of the environment."""
    return bool(MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN)


# ---- Whether one receive may listen to all ranks. This file knows no MPI.


def may_miss_from_any(library: str, nodes: Sequence[int]) -> bool:
    """Whether a receive from any source may never end although messages for it are there: MPICH 5.0.2 over UCX, so
    between nodes, where three ranks or more are at it and others are long (lost in 5 of 5 runs of two senders of 400
    KB; none of 5 over libfabric, and none where each source is named or probed for). Of what descends from MPICH
    nothing is known, so only Open MPI is trusted there."""
    return not library.startswith("Open MPI") and len(set(nodes)) > 1
