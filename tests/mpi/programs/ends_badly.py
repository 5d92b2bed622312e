"""Ways in which a rank's program ends, one a function; most ranks are blocked inside MPI meanwhile.

Arguments: the function's name, and its own.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.mpi import runtime

rt = runtime.start()
rt.role, rt.step = ("server" if rt.rank == 0 else "worker"), 40


class Seven(MpitrainError):
    """An error of the package's own with an exit code of its own."""

    exit_code = 7


def raise_at_step_41(error: BaseException) -> None:
    rt.step = 41
    raise error


def block() -> None:
    """For ever, inside MPI."""
    rt.comm.Recv(bytearray(1), rt.rank, 99)


def in_the_main_thread(run_dir: str) -> None:
    rt.run_dir = Path(run_dir)
    if rt.rank == 2:
        raise_at_step_41(ValueError("first line\nsecond line"))
    block()


def in_a_thread() -> None:
    if rt.rank == 0:
        threading.Thread(target=raise_at_step_41, args=(KeyError("in a thread"),)).start()
    block()


def in_a_collective() -> None:
    """Every rank's communication thread is inside an operation that never ends."""
    rt.engine.start_thread()
    inside = threading.Event()

    def collective() -> None:
        inside.set()
        if rt.rank != 2:
            rt.comm.Barrier()  # rank 2 never comes
        else:
            rt.comm.Recv(bytearray(1), 2, 98)

    op = rt.engine.call(collective)
    inside.wait()
    if rt.rank == 2:
        raise_at_step_41(Seven("our own"))
    rt.engine.wait(op)


def by_a_users_mistake() -> None:
    if rt.rank == 0:
        raise_at_step_41(UsageError("say this, not that"))
    block()


def by_agreement() -> None:
    rt.agree(Seven("everybody knows") if rt.rank == 1 else None)


def under_ddp() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("mpi4py")
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    for step in range(3):
        rt.step = step
        loss = model(torch.ones(2, 3)).sum()
        if rt.rank == 1 and step == 2:
            raise FloatingPointError("loss is bad")
        loss.backward()


def in_a_forked_child() -> None:
    child = os.fork()
    if child == 0:
        raise RuntimeError("in the child")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    rt.barrier()
    print("alive")


def not_at_all() -> None:
    """The program just ends: nobody calls `finish`, a thread listens, and one rank is late."""
    rt.engine.start_thread()
    rt.engine.irecv(bytearray(1), (rt.rank + 1) % rt.size, 1, passive=True)
    if rt.rank == 1:
        rt.engine.wait(rt.engine.irecv(bytearray(1), 0, 2))
    else:
        rt.engine.isend(b"x", 1, 2)
    print("end")


def on_the_last_rank() -> None:
    if rt.rank == rt.size - 1:
        raise_at_step_41(Seven("gone"))
    block()


def by_an_interrupt() -> None:
    """An interrupt in the middle of C++ code is not raised as what it is."""
    from mpitrain.system.files.error_record import exit_code

    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemError("returned a result with an exception set")  # noqa: B904 - as C++ code does
    except SystemError as error:
        assert exit_code(error) == 130
    assert exit_code(RuntimeError("KeyboardInterrupt: <EMPTY MESSAGE>")) == 130
    assert exit_code(RuntimeError("another")) == 1 and exit_code(Seven("ours")) == 7
    if rt.rank == 1:
        raise_at_step_41(KeyboardInterrupt())
    block()


WAYS: tuple[Callable[..., None], ...] = (
    in_the_main_thread, in_a_thread, in_a_collective, by_a_users_mistake, by_agreement, under_ddp, in_a_forked_child,
    not_at_all, on_the_last_rank, by_an_interrupt,
)  # fmt: skip
{way.__name__: way for way in WAYS}[sys.argv[1]](*sys.argv[2:])
