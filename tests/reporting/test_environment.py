"""env.json: named things only, and nothing that cannot be found out may end a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.reporting import environment
from mpitrain.reporting.environment import collect, git_revision
from mpitrain.system.launched import launch_variables
from mpitrain.system.launched.launch_variables import is_rank, launched_nodes, launched_rank, launched_size

OPENMPI_IN_SLURM = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
}


@pytest.mark.parametrize(
    ("environ", "rank", "size", "ranked"),
    [
        ({}, 0, None, False),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, 3, 8, True),
        (OPENMPI_IN_SLURM, 3, 8, True),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, 2, 4, True),
        (
            {"PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "9"},
            5,
            6,
            True,
        ),
        ({"PMI_RANK": "2", "PALS_RANKID": "2", "PMI_SIZE": "4", "PBS_JOBID": "1.s"}, 2, 4, True),
        ({"FLUX_TASK_RANK": "3", "PMI_RANK": "3", "FLUX_JOB_SIZE": "5"}, 3, 5, True),
        ({"PMIX_RANK": "1", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "6"}, 1, 6, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, 0, 16, False),  # the batch script of an allocation
        ({"OMPI_COMM_WORLD_RANK": "junk", "PMI_RANK": "-1"}, 0, None, True),
    ],
)
def test_rank_and_size_as_each_launcher_tells_them(
    environ: dict[str, str], rank: int, size: int | None, ranked: bool
) -> None:
    assert (launched_rank(environ), launched_size(environ), is_rank(environ)) == (rank, size, ranked)


def test_a_step_on_some_of_the_nodes_has_the_steps_nodes() -> None:
    assert launched_nodes({"SLURM_JOB_NUM_NODES": "8", "SLURM_STEP_NUM_NODES": "3"}) == 3
    assert launched_nodes({"SLURM_JOB_NUM_NODES": "8"}) == 8
    assert launched_nodes({}) is None


@pytest.mark.parametrize(
    ("environ", "system", "job", "local"),
    [
        ({}, None, "", None),
        ({"SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"}, "slurm", "7", 1),
        ({"PBS_JOBID": "7.server", "PMI_LOCAL_RANK": "2", "PALS_LOCAL_RANKID": "2"}, "pbs", "7.server", 2),
        ({"LSB_JOBID": "7", "JSM_NAMESPACE_LOCAL_RANK": "3"}, "lsf", "7", 3),
        # the batch job, not the launch in it, and not the Slurm job that Flux itself runs in
        (
            {"FLUX_JOB_ID": "f2", "FLUX_ENCLOSING_ID": "f1", "FLUX_TASK_LOCAL_ID": "0", "SLURM_JOB_ID": "7"},
            "flux",
            "f1",
            0,
        ),
        ({"FLUX_JOB_ID": "f2"}, "flux", "f2", None),
    ],
)
def test_whose_job_it_is(environ: dict[str, str], system: str | None, job: str, local: int | None) -> None:
    assert launch_variables.batch_system(environ) == system and launch_variables.job_id(environ) == job
    assert launch_variables.launched_local_rank(environ) == local


def test_the_nodes_of_a_job_with_a_host_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n2\nn2\n\nn1\n")
    assert launch_variables.allocated_hosts({"PBS_NODEFILE": str(hosts)}) == ["n2", "n1"]
    assert launched_nodes({"LSB_DJOB_HOSTFILE": str(hosts)}) == 2
    assert launched_nodes({"PBS_NODEFILE": "/gone"}) is None
    for name in ("FLUX_JOB_ID", "FLUX_ENCLOSING_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PBS_JOBID", "12[3].server")
    monkeypatch.setenv("PBS_O_PASSWORD", "hunter2")
    found = collect()["batch"]
    assert found == {"system": "pbs", "job": "12[3].server", "variables": {"PBS_JOBID": "12[3].server"}}


def test_no_variable_off_the_list_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv(
        "SLURM_JWT", "hunter2"
    )  # Slurm's own variables are no exception: this one is a password
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    text = json.dumps(collect())
    assert "hunter2" not in text
    facts = json.loads(text)
    assert facts["slurm"] == {"SLURM_JOB_ID": "77"} and facts["variables"]["OMP_NUM_THREADS"] == "3"


def test_collect_names_what_ran(tmp_path: Path) -> None:
    facts = collect()
    assert facts["packages"]["mpitrain"] and facts["packages"]["torch"]
    assert facts["python"]["executable"] == sys.executable
    assert facts["cores"]["usable"] == len(facts["cores"]["affinity"]) >= 1


def test_collect_imports_neither_torch_nor_mpi() -> None:
    code = """
import sys
from mpitrain.reporting.environment import collect
facts = collect()
print(facts["mpi"], facts["gpus"], {"torch", "mpi4py", "h5py"} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["None", "None", "set()"]


def test_what_is_installed_is_looked_up_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every run, of which a process may have hundreds. Where it runs may be another folder each time."""
    first, looked_at = collect(), list[Path]()
    monkeypatch.setattr(environment.metadata, "version", lambda name: pytest.fail(f"looks for {name} again"))
    monkeypatch.setattr(environment, "git_revision", looked_at.append)
    assert collect() == first | {"git": first["git"] | {"directory": None}} and looked_at == [Path.cwd()]


def test_a_missing_package_and_a_missing_git_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(
        environment, "_revision_of_package", environment._revision_of_package.__wrapped__
    )  # it may be known
    monkeypatch.setenv("PATH", "/nowhere")
    facts = collect()
    assert facts["packages"] == {"no-such-package": None}
    assert facts["git"] == {"mpitrain": None, "directory": None}


def test_git_revision_tells_changed_from_clean(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert git_revision(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = git_revision(tmp_path)
    assert clean == git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("2")
    assert git_revision(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path) == f"{clean}+changes"


def test_usable_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert launch_variables.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "host"),
        ({"SLURMD_NODENAME": "n7"}, "n7"),  # srun's own task
        (
            {"SLURMD_NODENAME": "n7", "HYDI_CONTROL_FD": "3"},
            "host",
        ),  # what mpiexec has found in its own environment
    ],
)
def test_a_node_goes_by_slurms_name_where_slurm_has_started_the_process(monkeypatch, environ, name):
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    assert launch_variables.node_name(environ) == name
    # one host may be several nodes of a Slurm, and one Slurm name is handed to several hosts by Hydra
    assert launch_variables.node_key(environ) != launch_variables.node_key({"SLURMD_NODENAME": "n8"})
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    assert launch_variables.node_key(environ).startswith("other")
