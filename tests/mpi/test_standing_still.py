"""A rank that stands still, or dies before MPI is up, is named, and neither its launch nor the healthy ranks hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.cases import launch_program
from tests.mpi.started import DEADLINE_S, Started
from tests.ranks import ROOT, find_mpi

ULFM = ("-n", "3", "--ft", "ulfm", "--max-restarts", "0")
# What meets rank 1 just before it would start MPI.
AMBUSH = """
import os, signal, sys

class Ambush:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py":
            os.kill(os.getpid(), signal.{name})

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    sys.meta_path.insert(0, Ambush())
"""


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
        ("SIGSTOP", "15", "did not begin to train within 15 s (--start-timeout-s)"),
    ],
)
def test_under_ulfm_a_rank_that_never_starts_mpi_ends_the_launch_by_name(
    tmp_path: Path, name: str, timeout_s: str, why: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AMBUSH.format(name=name))
    run = Started(tmp_path / "a", "nowhere", options=(*ULFM, "--start-timeout-s", timeout_s), path=tmp_path)
    assert run.code() == 1, run.told()
    assert f"rank 1 on host {os.uname().nodename} (importing) {why}" in run.told()


DIES_ONCE = """
import os, signal
from pathlib import Path
from mpitrain.system.launch_variables import launched_rank
from tests import toy

if launched_rank() == 1 and not Path("{died}").exists():
    Path("{died}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
job = toy.make_job(epochs=1)
"""


def test_under_ulfm_a_death_before_the_first_step_is_told_in_a_sentence_and_tried_once_more(
    tmp_path: Path,
) -> None:
    """The job file kills rank 1 while the others wait for it, in MPI."""
    (tmp_path / "job.py").write_text(DIES_ONCE.format(died=tmp_path / "died"))
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "3", "--ft", "ulfm", "train"]
    command += [str(tmp_path / "job.py"), "--quiet", "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended
    here = os.uname().nodename
    assert f"mpitrain: rank 1 on host {here} (preparing) died before the first step: ended" in ended.stderr, (
        ended
    )
    assert "restart 1 of 3 as it was started, once" in ended.stderr
    assert "Exception: MPI_ERR" not in ended.stderr and "Traceback" not in ended.stderr, ended
    assert json.loads((tmp_path / "run" / "result.json").read_text())["samples"] == 48
