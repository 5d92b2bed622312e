"""What a launcher says about this process, against what MPI has started: one launch is one job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpitrain.system.launched import launch_variables
from mpitrain.system.launched.launch_variables import in_slurm_step, launched_task, why_another_job

BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "mpi_size", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, 1, "launcher 4 (OMPI_COMM_WORLD_SIZE)"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, 2, "MPI knows 2 ranks and the launcher"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, 1, "(PMI_SIZE)"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3"}, 1, "(MV2_COMM_WORLD_SIZE)"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "3", "PMIX_RANK": "0"}, 1, "(JSM_NAMESPACE_SIZE)"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "3"}, 1, "(FLUX_JOB_SIZE)"),
        ({"PALS_RANKID": "2"}, 1, "the launcher at least 3 (PALS_RANKID)"),
        ({"PMIX_RANK": "1"}, 1, "the launcher at least 2 (PMIX_RANK)"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 1, "(WORLD_SIZE)"),
        (STEP, 1, "srun has handed this MPI no wiring"),
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2"}, 1, "srun --mpi=pmix is for Open MPI"),
        # Hydra's own daemons are a step of one task a node
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, 1,
         "it belongs to another MPI"),
        (STEP, 2, ""),
        (STEP, 3, ""),  # a step of two components: its variables are of one
        ({**STEP, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1, ""),  # mpirun inside of a step
        ({"PALS_RANKID": "0"}, 1, ""),
        # single runs
        ({}, 1, ""),
        (BATCH, 1, ""),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, 1, ""),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, 1, ""),  # salloc's own shell
        ({**STEP, "SLURM_PTY_PORT": "4711", "SLURM_TASK_PID": "1"}, 1, ""),  # typed in a shell of srun --pty
        ({"FLUX_JOB_SIZE": "3"}, 1, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1, ""),  # our own, which a child process inherits
    ],
)  # fmt: skip
def test_the_launchers_size_is_mpis(environ: dict[str, str], mpi_size: int, said: str) -> None:
    text = why_another_job(mpi_size, environ)
    assert said in text and bool(said) == bool(text)


def test_a_task_of_srun_on_a_terminal_is_one() -> None:
    environ = {**STEP, "SLURM_PTY_PORT": "4711", "SLURM_TASK_PID": str(os.getpid())}
    assert launched_task(environ) == (0, 2, "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize(("daemon", "is_step"), [("7.0", True), ("7.batch", False), ("7.interactive", False)])
def test_a_batch_script_that_was_submitted_from_inside_a_step_is_none(
    daemon: str, is_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_variables, "_parents_command", lambda pid: f"slurmstepd: [{daemon}]\0\0")
    assert in_slurm_step({**STEP, "SLURM_TASK_PID": "4711"}) == is_step


def test_whose_child_a_task_is_can_be_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open("/proc/self/cmdline") as own:
        assert launch_variables._parents_command(str(child.pid)) == own.read()
    child.communicate(b"\n")
    assert launch_variables._parents_command("") == launch_variables._parents_command("no number") == ""
