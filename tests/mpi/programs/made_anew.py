"""A group that survivors make anew (`process_group/reconfigurable.py`), as torch 2.14 asks for it, on 5 ranks under
ULFM: refused tries, deaths in a collective and while the group is made, an abort; then an orderly end of three."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import mpitrain  # noqa: F401
from mpitrain.errors import LostRankError, MismatchError
from mpitrain.mpi import runtime
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.faults import regroup
from mpitrain.mpi.faults.regroup import Regroup
from mpitrain.mpi.process_group import reconfigurable
from mpitrain.system import processes
from tests.mpi.cases import raises

LIMIT = timedelta(seconds=60)
rt = runtime.start()
group = reconfigurable.make(rt, list(range(rt.size)), LIMIT)
sums = c10d.AllreduceOptions()


def handle(rank: int) -> str:
    """Of a rank whose group is as this one's; rank and uuid there are no part of who it is."""
    pid = rt.processes[rank].split(":")[2]
    return group.get_reconfigure_handle() if rank == rt.rank else f"mpi4py:0:-1:{rank}:{pid}"


def asked(uuid, handles):
    return group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=LIMIT))


def common(ranks) -> list[str]:
    """One list for all: what matters of it, the members, is the same."""
    return [handle(rank) for rank in ranks]


def make(uuid, ranks) -> None:
    asked(uuid, common(ranks)).wait()


def adds_up(size: int, count: int = 3) -> None:
    assert group.size() == size and dist.ProcessGroup.size(group) == size
    tensor = torch.full((count,), group.rank() + 1.0)
    group.allreduce([tensor], sums).wait()
    assert tensor.eq(size * (size + 1) / 2).all(), tensor


def tries_that_are_refused() -> None:
    own = group.get_reconfigure_handle()
    raises(RuntimeError, "not made yet", lambda: group.allreduce([torch.ones(2)], sums))
    raises(RuntimeError, "not made yet", lambda: group.send([torch.ones(2)], 0, 0))
    raises(RuntimeError, "at least one", lambda: asked(1, []))
    raises(RuntimeError, "given twice", lambda: asked(1, [own, own]))
    raises(RuntimeError, "one process", lambda: asked(1, [own, own.replace(":-1:", ":7:", 1)]))
    raises(RuntimeError, "own handle", lambda: asked(1, [handle((rt.rank + 1) % rt.size)]))
    for wrong in ("nonsense", f"mpi4py:0:-1:{rt.size}:1", "mpi4py:0:-1:0:1", "gloo:0:-1:0:1"):
        raises(RuntimeError, "no handle of a process of this launch", partial(asked, 1, [own, wrong]))
    make(1, range(rt.size))
    adds_up(5)
    raises(RuntimeError, "already used", lambda: make(1, range(rt.size)))
    others = list(range(rt.size)) if rt.rank else [0, 2, 1, 3, 4]
    raises((MismatchError, LostRankError), "2", lambda: make(2, others))
    adds_up(5)  # it is as it was
    asked(3, set(common(reversed(range(rt.size))))).wait()
    assert group.rank() == rt.rank and group._get_sequence_number_for_group() == 0
    make(4, [4, 3, 2, 1, 0])
    assert (group.rank(), dist.ProcessGroup.rank(group)) == (4 - rt.rank,) * 2
    adds_up(5)


def refuse(*_: object) -> None:
    """As the launcher does now and then where a member has died."""
    while not processes.is_gone(rt.processes[4]):
        time.sleep(0.01)
    raise MPI.Exception(MPI.ERR_UNSUPPORTED_OPERATION)


UNSUPPORTED = SimpleNamespace(
    Exception=MPI.Exception, INFO_NULL=MPI.INFO_NULL, ERRORS_RETURN=MPI.ERRORS_RETURN,
    Intracomm=SimpleNamespace(Create_from_group=refuse),
)  # fmt: skip


def a_member_dies_while_the_group_is_made() -> None:
    """Behind the meeting, where the others already wait in MPI for a member that never comes, or are refused there."""
    if rt.rank == 4:
        with mock.patch.object(Regroup, "_create", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            make(5, range(5))
    with mock.patch.object(regroup, "MPI", UNSUPPORTED) if rt.rank == 0 else contextlib.nullcontext():
        raises(LostRankError, "", lambda: make(5, range(5)))
    make(6, range(4))
    adds_up(4)


def a_member_dies_in_a_collective() -> None:
    told = threading.Event()
    group.register_abort_hook(1, told.set)
    if rt.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    later = group.allreduce([torch.ones(3)], sums)
    raises(RuntimeError, "MPI_ERR_", later.wait)  # the death, or that another rank has met it
    assert told.wait(60) and group.get_error() != c10d.ErrorType.SUCCESS
    raises(RuntimeError, "make it anew", lambda: group.allreduce([torch.ones(3)], sums))
    raises(LostRankError, "", lambda: make(7, range(4)))  # it is among them yet
    make(8, range(3))
    assert group.get_error() == c10d.ErrorType.SUCCESS
    for count in (1, 100, 1_000_000):
        adds_up(3, count)


def one_rank_aborts() -> None:
    inbox = torch.zeros(1)
    if rt.rank == 0:
        group.abort()
    else:
        raises(RuntimeError, "REVOKED", group.recv([inbox], 0, 0).wait)
    raises(RuntimeError, "make it anew", lambda: group.allreduce([torch.ones(3)], sums))
    make(9, range(3))
    adds_up(3)
    under_way = group.recv([inbox], (rt.rank + 1) % 3, 0)
    make(10, range(3))
    raises(RuntimeError, "made anew meanwhile", under_way.wait)
    adds_up(3)
    group.shutdown()
    raises(RuntimeError, "has left", lambda: group.allreduce([torch.ones(3)], sums))


for step in (
    tries_that_are_refused, a_member_dies_while_the_group_is_made, a_member_dies_in_a_collective, one_rank_aborts,
):  # fmt: skip
    step()
    print(f"ok {step.__name__}", flush=True)
