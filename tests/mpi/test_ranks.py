"""The helper that starts ranks: it tells ranks apart, kills what hangs, and leaves nothing behind."""

import contextlib
import shlex
import warnings
from pathlib import Path

import pytest

from tests.mpi.cases import case_names, is_passed, launch, launch_program
from tests.ranks import RanksHung, find_mpi, needs_open_mpi, run_ranks

RANK = """\
import os, sys, time, subprocess
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
"""


def living(pid_file: Path) -> list[int]:
    """Which of the processes that wrote their ids are still there (zombies are not)."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pid_file.read_text().split()}
    return [
        int(pid)
        for pid, stat in stats.items()
        if stat.exists() and stat.read_text().split(")")[-1].split()[0] != "Z"
    ]


def test_output_is_told_apart_by_rank_and_by_stream():
    result = run_ranks(
        3, RANK + "print('out', rank, '\\nsecond line')\nprint('err', rank, file=sys.stderr)\n"
    ).check()
    assert result.ranks_out == tuple(f"out {rank} \nsecond line\n" for rank in range(3))
    assert result.ranks_err == tuple(f"err {rank}\n" for rank in range(3))
    assert sorted(result.stdout.split("\n")) == sorted("".join(result.ranks_out).split("\n"))


def test_exit_code_is_the_jobs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANK + "sys.exit(3 if rank == 1 else 0)\n")
    result = run_ranks(2, script)
    assert result.code == 3
    with pytest.raises(AssertionError, match="exit code 3"):
        result.check()


def test_a_hang_is_killed_with_stacks_and_nothing_is_left(tmp_path):
    """Every rank sleeps for ever in a function; rank 1 also ignores SIGTERM and has a child of its own."""
    pids = tmp_path / "pids"
    for timeout_s in (3, 20, 60):  # a deadline that comes before the ranks do shows nothing
        pids.write_text("")
        with pytest.raises(RanksHung) as caught:
            launch_program(2, "hangs", str(pids), timeout_s=timeout_s)
        text = str(caught.value)
        if len(pids.read_text().split()) == 3 and text.count("before the hang") == 2:
            break
    assert (
        f"no end within {timeout_s} s" in text and "before the hang" in text and "in sleeps_for_ever" in text
    )
    assert len(pids.read_text().split()) == 3 and living(pids) == []


def test_a_process_left_behind_is_killed_and_told(tmp_path):
    """The launch ends well, but a rank's child lives on: that fails the test that caused it."""
    pids = tmp_path / "pids"
    with pytest.raises(RanksHung, match="processes were left.*sleep"):
        launch_program(1, "leaves_a_child", str(pids))
    assert living(pids) == []


def test_mpich_is_skipped_with_the_reason_where_it_is_absent(monkeypatch):
    needs_open_mpi("looks for MPICH beside it")
    monkeypatch.delenv("MPITRAIN_MPICH_VENV", raising=False)
    with pytest.raises(pytest.skip.Exception, match="MPITRAIN_MPICH_VENV"):
        run_ranks(1, "print()\n", mpi="mpich")


def test_cases_that_fail_take_none_of_the_following_along():
    run = launch(2, "failing_cases")
    names = case_names("failing_cases")
    failing = {"case_that_raises_on_one_rank", "case_that_dies", "case_that_leaves_with_code_3"}
    assert {name for name in names if not is_passed(run, name)} == failing
    assert run.code != 0 and "planted" in run.stderr


def test_ranks_that_stand_inside_mpis_start_are_started_once_more(tmp_path):
    """Two ranks wait in `MPI_Init` for a third, which comes in the second launch only. Hydra ends all ranks as soon as
    one answers SIGABRT, so not every rank's stack is had there."""
    needs_open_mpi("asks every rank for its stack")
    mark = tmp_path / "mark"
    python = str(find_mpi()[0])
    begins = [python, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    third = f"test -e {mark} && exec {shlex.join(begins)}; touch {mark}; exec sleep 1000"
    for timeout_s in (3, 20, 60):  # a deadline that comes before the ranks do shows nothing
        mark.unlink(missing_ok=True)
        with contextlib.suppress(RanksHung), pytest.warns(UserWarning, match="inside MPI's start") as told:
            result = run_ranks(2, [*begins, ":", "-n", "1", "sh", "-c", third], timeout_s=timeout_s)
            break
    assert result.check().ranks_out == ("3\n", "3\n")
    assert f"no end within {timeout_s} s; living: " in str(told[0].message)


def test_one_rank_that_hangs_before_mpis_start_is_told_at_once():
    """The other waits for it in `MPI_Init`."""
    program = RANK + "if rank == 0:\n    from mpi4py import MPI\ntime.sleep(1000)\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RanksHung, match="no end within 3 s"):
            run_ranks(2, program, timeout_s=3)
