"""One rank's exception ends the whole job, names rank, role and step, and never hangs: in a plain script (no
`python -m mpi4py`), in a thread, during a collective, under DDP's hooks, and with fault tolerance on.
"""

import json
import re

import pytest

from tests.ranks import run_ranks

START = """
import sys, threading
from mpitrain.errors import AgreedError, MpitrainError, UsageError
from mpitrain.mpi import runtime

rt = runtime.start()
rt.role, rt.step = ("server" if rt.rank == 0 else "worker"), 40

class Seven(MpitrainError):
    exit_code = 7

def planted(error):
    rt.step = 41
    raise error
"""
WAIT = """
rt.comm.Recv(bytearray(1), rt.rank, 99)  # for ever, inside MPI
"""


def said(result, rank):
    """What a rank told on stderr; every line must carry its tag."""
    lines = [line for line in result.ranks_err[rank].splitlines() if line.startswith(f"[rank {rank}] ")]
    return "\n".join(line.removeprefix(f"[rank {rank}] ") for line in lines)


@pytest.mark.parametrize("launch", [(), ("--with-ft", "ulfm")], ids=["default", "ulfm"])
def test_an_exception_in_the_main_thread(tmp_path, launch):
    """The others are blocked inside MPI; the report has the traceback, the last line names who, when and what."""
    code = f"""
from pathlib import Path
rt.run_dir = Path({str(tmp_path)!r})
if rt.rank == 2:
    planted(ValueError("first line\\nsecond line"))
"""
    result = run_ranks(3, START + code + WAIT, mpirun_args=launch)
    assert result.code != 0, result
    text = said(result, 2)
    assert "in planted" in text
    assert text.endswith("mpitrain: rank 2 (worker, step 41): ValueError: first line\nsecond line"), result
    record = json.loads((tmp_path / "errors" / "rank-2.json").read_text())
    assert (record["rank"], record["role"], record["step"], record["exit_code"]) == (2, "worker", 41, 1)
    assert record["type"] == "ValueError" and "in planted" in record["traceback"]
    if launch:  # with fault tolerance nobody is killed by the launcher: MPI itself must tell the others
        assert any(re.search("MPI_ERR_(REVOKED|PROC_FAILED)", said(result, rank)) for rank in (0, 1)), result


@pytest.mark.parametrize("launch", [(), ("--with-ft", "ulfm")], ids=["default", "ulfm"])
def test_an_exception_in_a_thread_while_the_main_thread_is_in_mpi(launch):
    code = """
if rt.rank == 0:
    threading.Thread(target=planted, args=(KeyError("in a thread"),)).start()
"""
    result = run_ranks(3, START + code + WAIT, mpirun_args=launch)
    assert result.code != 0, result
    assert "mpitrain: rank 0 (server, step 41): KeyError: 'in a thread'" in said(result, 0), result


def test_our_errors_keep_their_exit_code_while_the_thread_is_in_a_collective():
    """The communication thread of the failing rank, and of the others, is inside Allreduce at that moment."""
    code = """
import numpy as np
rt.engine.start_thread()
inside = threading.Event()

def collective():
    inside.set()
    if rt.rank != 2:
        rt.comm.Barrier()  # rank 2 never comes
    else:
        rt.comm.Recv(bytearray(1), 2, 98)

op = rt.engine.call(collective)
inside.wait()
if rt.rank == 2:
    planted(Seven("our own"))
rt.engine.wait(op)
"""
    result = run_ranks(3, START + code)
    assert result.code == 7, result
    assert said(result, 2).endswith("mpitrain: rank 2 (worker, step 41): Seven: our own"), result


def test_a_users_mistake_needs_no_traceback():
    """UsageError: exit code 2, one line; on a single rank too, where no other has to be ended."""
    for ranks in (1, 2):
        result = run_ranks(
            ranks, START + "if rt.rank == 0:\n    planted(UsageError('say this, not that'))\n" + WAIT
        )
        assert result.code == 2, result
        assert said(result, 0) == "mpitrain: rank 0 (server, step 41): UsageError: say this, not that"


def test_ranks_that_agreed_leave_together():
    """An uncaught AgreedError ends in order: told once, by rank 0, with the agreed exit code and nothing aborted."""
    result = run_ranks(3, START + "rt.agree(Seven('everybody knows') if rt.rank == 1 else None)\n")
    assert result.code == 7, result
    assert result.ranks_err[0] == "mpitrain: rank 1: Seven: everybody knows\n"
    assert result.ranks_err[1] == result.ranks_err[2] == "" and "MPI_ABORT" not in result.stderr


def test_torch_does_not_swallow_the_report():
    """torch.distributed lends exception hooks a stderr of its own; an exception under DDP is reported all the same."""
    code = """
import mpitrain, torch, torch.distributed as dist
dist.init_process_group("mpi4py")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(3):
    rt.step = step
    loss = model(torch.ones(2, 3)).sum()
    if rt.rank == 1 and step == 2:
        raise FloatingPointError("loss is bad")
    loss.backward()
"""
    result = run_ranks(2, START + code)
    assert result.code == 1, result
    assert "mpitrain: rank 1 (worker, step 2): FloatingPointError: loss is bad" in said(result, 1), result


def test_a_forked_child_is_no_rank():
    """A data loader's worker that dies of an exception does not take the job along."""
    code = """
import os
child = os.fork()
if child == 0:
    raise RuntimeError("in the child")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
rt.barrier()
print("alive")
"""
    result = run_ranks(2, START + code).check()
    assert result.ranks_out == ("alive\n", "alive\n")
    assert all("RuntimeError: in the child" in err and "[rank" not in err for err in result.ranks_err)


def test_a_script_that_just_ends_ends_well():
    """No call of finish: the orderly end comes at exit, also with a thread that listens, and waits for late ranks."""
    code = """
import time
rt.engine.start_thread()
rt.engine.irecv(bytearray(1), (rt.rank + 1) % rt.size, 1, passive=True)
if rt.rank == 1:
    rt.engine.wait(rt.engine.irecv(bytearray(1), 0, 2))
else:
    rt.engine.isend(b"x", 1, 2)
print("end")
"""
    result = run_ranks(2, START + code).check()
    assert result.ranks_out == ("end\n", "end\n") and result.stderr == ""


def test_under_mpich_too():
    result = run_ranks(3, START + "if rt.rank == 2:\n    planted(Seven('gone'))\n" + WAIT, mpi="mpich")
    assert result.code != 0, result
    assert re.search(r"mpitrain: rank 2 \(worker, step 41\): Seven: gone", result.stderr), result


def test_an_interrupt_is_one_whatever_error_it_comes_out_as():
    """In the middle of C++ code it is not raised as what it is."""
    code = """
from mpitrain.mpi.faults.error_report import exit_code
try:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemError("returned a result with an exception set")
except SystemError as error:
    assert exit_code(error) == 130
assert exit_code(RuntimeError("KeyboardInterrupt: <EMPTY MESSAGE>")) == 130
assert exit_code(RuntimeError("another")) == 1 and exit_code(Seven("ours")) == 7
if rt.rank == 1:
    planted(KeyboardInterrupt())
"""
    result = run_ranks(2, START + code + WAIT)
    assert result.code == 130, result
    assert said(result, 1) == "mpitrain: rank 1 (worker, step 41): interrupted", result
