"""One rank's exception ends the whole job, names rank, role and step, and never hangs: in a plain script (no
`python -m mpi4py`), in a thread, during a collective, under DDP's hooks, and with fault tolerance on.
"""

import json
import re
import sys

import pytest

from tests.mpi.cases import launch_program
from tests.ranks import needs_open_mpi, run_ranks


def said(result, rank):
    """What a rank told on stderr; every line must carry its tag."""
    lines = [line for line in result.ranks_err[rank].splitlines() if line.startswith(f"[rank {rank}] ")]
    return "\n".join(line.removeprefix(f"[rank {rank}] ") for line in lines)


@pytest.mark.parametrize("launch", [(), ("--with-ft", "ulfm")], ids=["default", "ulfm"])
def test_an_exception_in_the_main_thread(tmp_path, launch):
    """The others are blocked inside MPI; the report has the traceback, the last line names who, when and what."""
    result = launch_program(3, "ends_badly", "in_the_main_thread", str(tmp_path), mpirun_args=launch)
    assert result.code != 0, result
    text = said(result, 2)
    assert "in raise_at_step_41" in text
    assert text.endswith("mpitrain: rank 2 (worker, step 41): ValueError: first line\nsecond line"), result
    record = json.loads((tmp_path / "errors" / "rank-2.json").read_text())
    assert (record["rank"], record["role"], record["step"], record["exit_code"]) == (2, "worker", 41, 1)
    assert record["type"] == "ValueError" and "in raise_at_step_41" in record["traceback"]
    if launch:  # with fault tolerance nobody is killed by the launcher: MPI itself must tell the others
        assert any(re.search("MPI_ERR_(REVOKED|PROC_FAILED)", said(result, rank)) for rank in (0, 1)), result


@pytest.mark.parametrize("launch", [(), ("--with-ft", "ulfm")], ids=["default", "ulfm"])
def test_an_exception_in_a_thread_while_the_main_thread_is_in_mpi(launch):
    result = launch_program(3, "ends_badly", "in_a_thread", mpirun_args=launch)
    assert result.code != 0, result
    assert "mpitrain: rank 0 (server, step 41): KeyError: 'in a thread'" in said(result, 0), result


def test_our_errors_keep_their_exit_code_while_the_thread_is_in_a_collective():
    """The communication thread of the failing rank, and of the others, is inside Allreduce at that moment."""
    result = launch_program(3, "ends_badly", "in_a_collective")
    assert result.code == 7, result
    assert said(result, 2).endswith("mpitrain: rank 2 (worker, step 41): Seven: our own"), result


def test_a_users_mistake_needs_no_traceback():
    """UsageError: exit code 2, one line; on a single rank too, where no other has to be ended."""
    for ranks in (1, 2):
        result = launch_program(ranks, "ends_badly", "by_a_users_mistake")
        assert result.code == 2, result
        assert said(result, 0) == "mpitrain: rank 0 (server, step 41): UsageError: say this, not that"


def test_ranks_that_agreed_leave_together():
    """An uncaught AgreedError ends in order: told once, by rank 0, with the agreed exit code and nothing aborted."""
    needs_open_mpi("Hydra mixes exit codes of ranks")
    result = launch_program(3, "ends_badly", "by_agreement")
    assert result.code == 7, result
    assert result.ranks_err[0] == "mpitrain: rank 1: Seven: everybody knows\n"
    assert result.ranks_err[1] == result.ranks_err[2] == "" and "MPI_ABORT" not in result.stderr


def test_torch_does_not_swallow_the_report():
    """torch.distributed lends exception hooks a stderr of its own; an exception under DDP is reported all the same."""
    result = launch_program(2, "ends_badly", "under_ddp")
    assert result.code == 1, result
    assert "mpitrain: rank 1 (worker, step 2): FloatingPointError: loss is bad" in said(result, 1), result


def test_a_forked_child_is_no_rank():
    """A data loader's worker that dies of an exception does not take the job along."""
    result = launch_program(2, "ends_badly", "in_a_forked_child").check()
    assert result.ranks_out == ("alive\n", "alive\n")
    assert all("RuntimeError: in the child" in err and "[rank" not in err for err in result.ranks_err)


def test_a_script_that_just_ends_ends_well():
    """No call of finish: the orderly end comes at exit, also with a thread that listens, and waits for late ranks."""
    result = launch_program(2, "ends_badly", "not_at_all").check()
    assert result.ranks_out == ("end\n", "end\n") and result.stderr == ""


def test_under_mpich_too():
    result = launch_program(3, "ends_badly", "on_the_last_rank", mpi="mpich")
    assert result.code != 0, result
    assert re.search(r"mpitrain: rank 2 \(worker, step 41\): Seven: gone", result.stderr), result


def test_an_interrupt_is_one_whatever_error_it_comes_out_as():
    """In the middle of C++ code it is not raised as what it is."""
    result = launch_program(2, "ends_badly", "by_an_interrupt")
    assert result.code == 130, result
    assert said(result, 1) == "mpitrain: rank 1 (worker, step 41): interrupted", result


JOB = """\
import atexit, gc
from tests.toy import make_job
before = gc.get_freeze_count()
atexit.register(lambda: print("kept from the last collection:", gc.get_freeze_count() - before))
job = make_job(epochs=1)
"""


def test_the_exit_of_a_rank_does_not_walk_through_all_objects_of_torch(tmp_path):
    """That was most of an exit's work, 0.6 s of a core for every rank, and 26 s among others that computed."""
    (tmp_path / "job.py").write_text(JOB)
    words = [
        "-m",
        "mpitrain",
        "train",
        str(tmp_path / "job.py"),
        "--run-dir",
        str(tmp_path / "run"),
        "--quiet",
    ]
    told = run_ranks(1, [sys.executable, *words]).check().stdout
    assert int(told.rpartition("collection: ")[2]) > 0, told
