"""A process group that survivors of a death make anew: torch's reconfigure interface (2.14 and later), over ULFM.

    init_process_group("mpi4py", enable_reconfigure=True)    no communicator yet
    _get_reconfigure_handle()                                this rank, for the others: by a store, a file, ...
    _reconfigure(uuid, handles).wait()                       a group of those whose handles these are
    a death, abort()                                         every rank is brought out of the group with an error
    _reconfigure(another uuid, handles of the living)        and so on

Invariants: the members alone take part, in the order of a list of handles, or in that of MPI where they are a set. A
try that fails leaves the group as it was. A communicator is revoked after an error or by `abort()`, never because the
group is made anew: another rank may not yet be ready to leave it. Handles, uuid and refusals are as those of torch's
gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mpitrain import torch_versions
from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import Task
from mpitrain.mpi.faults.agreement import revoke_all
from mpitrain.mpi.faults.regroup import Comms, Regroup
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group.process_group import MpiProcessGroup, ranks_of
from mpitrain.mpi.process_group.work import MpiWork
from mpitrain.mpi.runtime import Runtime
from mpitrain.torch_backend import BACKEND

_NOT_YET = (
    "the group is not made yet: exchange handles (torch.distributed._get_reconfigure_handle) and call"
    " torch.distributed._reconfigure first, because of enable_reconfigure=True"
)
_used: set[int] = set()  # uuids, of this process


def why_not(runtime: Runtime) -> str:
    """Why no group of this launch can be made anew; empty if one can."""
    if runtime.fault_tolerance == "ulfm":
        return ""
    return (
        f'the backend "{BACKEND}" makes a group anew after a death (enable_reconfigure) only where MPI reports deaths:'
        " start the ranks by mpitrain launch --ft ulfm, or mpirun --with-ft ulfm of Open MPI 5; otherwise start the job"
        " again from its last checkpoint (docs/fault-tolerance.md)"
    )


class ReconfigurableGroup(MpiProcessGroup):
    """The default group under `enable_reconfigure=True`. Until it is made, its rank and size are those that
    `init_process_group` was given."""

    _uuid = -1
    _closed = _NOT_YET  # why nothing can be carried out now; empty if it can

    def start(self, name: str = "") -> None:
        """From here on the communication thread owns MPI; there are no communicators yet."""
        self._has_left = True
        self._runtime.start_thread()
        self._runtime.groups.append(self)
        self._runtime.regroups = True

    def getRank(self) -> int:
        """As `rank()`, for C++."""
        return self._rank

    def getSize(self) -> int:
        """As `size()`, for C++."""
        return self._size

    def _check_member(self, name: str) -> None:
        if self._closed:
            raise RuntimeError(f"{name}: {self._closed}")

    # ---- making it

    @property
    def supports_reconfigure(self) -> bool:
        """True."""
        return True

    def get_reconfigure_handle(self) -> str:
        """mpi4py:RANK:UUID:MPI RANK:PID, with rank and uuid of the group as it is."""
        return f"{BACKEND}:{self._rank}:{self._uuid}:{self._runtime.rank}:{os.getpid()}"

    def reconfigure(self, options: Any) -> MpiWork:
        """Make the group of those whose handles these are; done when every member has it.

        Raises:
            RuntimeError: the handles do not name ranks of this launch, each once and this one among them, or this
                process has used the uuid.
        """
        members = self._members(options.handles)
        if options.uuid in _used:
            raise RuntimeError(
                f"reconfigure: uuid {options.uuid} was already used by this process; give another"
            )
        _used.add(options.uuid)
        timeout = options.timeout if isinstance(options.timeout, timedelta) else self._timeout
        work = MpiWork(self._engine, "reconfigure", [], timeout)
        op = self._engine.call(lambda: self._regroup(options.uuid, members, timeout.total_seconds()))
        op.then(work.settle)
        return work

    def _members(self, handles: Iterable[str]) -> list[int]:
        """The MPI ranks in the order of the new group."""
        given = list(handles)
        if not given:
            raise RuntimeError("reconfigure: there must be at least one handle")
        if len(set(given)) < len(given):
            raise RuntimeError("reconfigure: a handle is given twice")
        if self.get_reconfigure_handle() not in given:
            raise RuntimeError(
                f"reconfigure: this rank's own handle, {self.get_reconfigure_handle()}, is not among those given; ask"
                " for a new one each time"
            )
        members = [self._member(handle) for handle in given]
        if len(set(members)) < len(members):
            raise RuntimeError(f"reconfigure: two handles are of one process: {', '.join(sorted(given))}")
        return members if isinstance(handles, list) else sorted(members)

    def _member(self, handle: str) -> int:
        backend, *numbers = handle.split(":")
        known = self._runtime.processes
        if backend == BACKEND and len(numbers) == 4 and numbers[2].isdecimal():
            rank = int(numbers[2])
            if rank < len(known) and known[rank].split(":")[2:3] in ([numbers[3]], []):
                return rank
        raise RuntimeError(f"reconfigure: {handle!r} is no handle of a process of this launch")

    def _regroup(self, uuid: int, members: list[int], timeout_s: float) -> Task:
        runtime = self._runtime
        maker = Regroup(self._engine, runtime.comm, runtime.processes, members, str(uuid))
        comms: Comms = yield from maker.make(timeout_s)
        self._drop(RuntimeError("the group was made anew meanwhile (reconfigure)"))
        self._comm, self._control_comm = comms
        runtime.communicators += comms
        self._uuid, self._closed, self._has_left, self._failure = uuid, "", False, None
        self._num_collectives = 0
        self._announcements.clear()
        self._consist_of(members)
        if self is dist.group.WORLD:
            runtime.torch_ranks = tuple(members)
        torch_versions.renumber_group(self, len(members))

    # ---- ending it

    def _drop(self, error: BaseException) -> None:
        """In the thread that owns MPI: what is under way in the group fails. Its communicators stay, for MPI may yet
        write to what was under way on them."""
        if self._comm != MPI.COMM_NULL:
            self._engine.forget((self._comm, self._control_comm), error)
            for comm in (self._comm, self._control_comm):
                self._runtime.communicators.remove(comm)

    def _give_up(self, error: BaseException) -> None:
        self._close(f"the group has failed ({error}); make it anew with torch.distributed._reconfigure")
        super()._give_up(error)

    def _close(self, why: str) -> None:
        """Bring every rank out of the group."""
        if not self._closed:
            self._closed, self._has_left = why, True
            self._engine.call(lambda: revoke_all((self._comm, self._control_comm)))

    def abort(self) -> None:
        """Bring every rank out of the group, after the hooks have been called."""
        self._call_abort_hooks()
        self._close("the group was aborted; make it anew with torch.distributed._reconfigure")

    def leave(self) -> Op | None:
        """Leave the group without waiting for any rank: who is in it differs from rank to rank."""
        if self in self._runtime.groups:
            self._runtime.groups.remove(self)
            self._has_left, self._closed = True, "this rank has left the group (destroy_process_group)"
            self._engine.run(lambda: self._drop(RuntimeError(self._closed)))
        return None


def create(options: Any, backend_options: Any = None) -> ReconfigurableGroup:
    """The creator that torch.distributed calls under `enable_reconfigure=True`."""
    runtime, ranks = ranks_of(options)
    return make(runtime, ranks, options.timeout)


def make(runtime: Runtime, ranks: list[int], timeout: timedelta) -> ReconfigurableGroup:
    """The default group of these MPI ranks, which is yet to be made by `reconfigure`.

    Raises:
        UsageError: this launch knows of no deaths.
    """
    if text := why_not(runtime):
        raise UsageError(text)
    group = ReconfigurableGroup(runtime, ranks, timeout)
    group.start()
    return group
