"""A rank that stands still, or dies before MPI is up, is named, and neither its launch nor the healthy ranks hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.cases import PROGRAMS, launch_program
from tests.mpi.started import DEADLINE_S, Started
from tests.ranks import ROOT, find_mpi, needs_open_mpi, warm_environment

ULFM = ("-n", "3", "--ft", "ulfm", "--max-restarts", "0")


@pytest.fixture(autouse=True)
def have_mpi() -> None:
    find_mpi()


NAMED = f"rank 1 on host {os.uname().nodename} stands still"


def test_under_ulfm_a_rank_that_stands_still_is_ended_and_the_healthy_ones_go_on(tmp_path: Path) -> None:
    run = launch_program(3, "stands_still", str(tmp_path), mpirun_args=("--with-ft", "ulfm"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["lost"], result["samples"]) == ("ok", {"1": "died"}, 5 * 48)
    assert f"{NAMED} and was ended" in run.stderr, run


def test_without_fault_tolerance_a_rank_that_stands_still_ends_the_job_by_name(tmp_path: Path) -> None:
    run = launch_program(3, "stands_still", str(tmp_path))
    assert run.code not in (0, 75) and not (tmp_path / "run" / "result.json").exists(), run
    assert f"because {NAMED}: it does not answer" in run.stderr, run


@pytest.mark.parametrize(
    ("name", "timeout_s", "why"),
    [
        ("SIGKILL", "600", "died before it began to train"),
        pytest.param(
            "SIGSTOP",
            "15",
            "did not begin to train within 15 s (--start-timeout-s)",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_under_ulfm_a_rank_that_never_starts_mpi_ends_the_launch_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, timeout_s: str, why: str
) -> None:
    needs_open_mpi("asks for --ft ulfm")
    monkeypatch.setenv("AMBUSH", name)
    options = (*ULFM, "--start-timeout-s", timeout_s)
    run = Started(tmp_path / "a", "nowhere", options=options, path=PROGRAMS / "ambush")
    assert run.code() == 1, run.told()
    assert f"rank 1 on host {os.uname().nodename} (importing) {why}" in run.told()


def test_under_ulfm_a_death_before_the_first_step_is_told_in_a_sentence_and_tried_once_more(
    tmp_path: Path,
) -> None:
    """The job file kills rank 1 while the others wait for it, in MPI."""
    needs_open_mpi("asks for --ft ulfm")
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "3", "--ft", "ulfm", "train"]
    command += [str(PROGRAMS / "dies_once.py"), "--quiet", "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DIED": str(tmp_path / "died")}
    env = warm_environment(env, tmp_path / "ranks")
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended
    here = os.uname().nodename
    assert f"mpitrain: rank 1 on host {here} (preparing) died before the first step: ended" in ended.stderr, (
        ended
    )
    assert "restart 1 of 3 as it was started, once" in ended.stderr
    assert "Exception: MPI_ERR" not in ended.stderr and "Traceback" not in ended.stderr, ended
    assert json.loads((tmp_path / "run" / "result.json").read_text())["samples"] == 48
