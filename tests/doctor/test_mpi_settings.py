"""What `doctor --comm` says of the MPI's settings, and of ranks that share cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.doctor.mpi_settings import acting, lines, yields_to_others
from tests.ranks import find_mpi, is_intel, run_ranks

ALL = {
    "OMPI_MCA_btl": "^tcp",
    "OMPI_MCA_ess_base_jobid": "1",
    "MPIR_CVAR_NOLOCAL": "1",
    "MPICH_GPU_SUPPORT_ENABLED": "1",
    "I_MPI_CBWR": "1",
    "I_MPI_PIN": "off",
    "I_MPI_PIN_MAPPING": "2:0 0,1 1",
    "I_MPI_ROOT": "/opt",
    "FI_PROVIDER_PATH": "/opt/lib",
    "UCX_TLS": "sm",
    "HOME": "/",
}


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("Open MPI v5.0.11, package: x", ["OMPI_MCA_btl", "UCX_TLS"]),
        ("MPICH Version:      5.0.2", ["MPIR_CVAR_NOLOCAL", "UCX_TLS"]),
        ("CRAY MPICH version 8.1", ["MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_NOLOCAL", "UCX_TLS"]),
        ("Intel(R) MPI Library 2021.18", ["I_MPI_CBWR", "I_MPI_PIN", "UCX_TLS"]),
        (
            "Another MPI",
            [
                "I_MPI_CBWR",
                "I_MPI_PIN",
                "MPICH_GPU_SUPPORT_ENABLED",
                "MPIR_CVAR_NOLOCAL",
                "OMPI_MCA_btl",
                "UCX_TLS",
            ],
        ),
    ],
)
def test_what_acts_is_what_this_mpi_reads(library: str, names: list[str]) -> None:
    assert list(acting(library, ALL)) == names


def test_a_rank_that_yields_to_nobody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    assert yields_to_others(4, 2, tmp_path)  # of a kernel that does not group
    for grouped, place, yields in (("1", "/", False), ("0", "/", True), ("1", "/slurm/job_1", True)):
        (tmp_path / "sys/kernel/sched_autogroup_enabled").write_text(f"{grouped}\n")
        (tmp_path / "self/cgroup").write_text(f"9:name=systemd:/user\n2:cpu,cpuacct:{place}\n")
        assert yields_to_others(4, 2, tmp_path) == yields and yields_to_others(2, 2, tmp_path)
    (tmp_path / "self/cgroup").write_text("2:cpu:/\n")
    assert not yields_to_others(4, 2, tmp_path)
    monkeypatch.setattr(os, "getsid", lambda pid: 1)
    assert yields_to_others(4, 2, tmp_path)  # all in one session
    assert "sched_autogroup_enabled=0" in list(lines("MPICH Version: 5", {}, False))[1]
    assert list(lines("MPICH Version:      5", {}, True)) == ["MPICH Version: 5 is told: nothing"]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_set_what_their_mpi_waits_well_by_and_ulfm_is_refused_where_it_is_not(mpi: str) -> None:
    python = str(find_mpi(mpi)[0])
    told = run_ranks(2, [python, "-m", "mpitrain", "doctor", "--comm"], mpi=mpi).check().stdout
    setting = {
        "openmpi": "OMPI_MCA_mpi_yield_when_idle=1",
        "mpich": "I_MPI_CBWR=1" if is_intel(mpi) else "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=mpir",
    }
    assert " is told: " in told and setting[mpi] in told, told
    refused = run_ranks(
        1, [python, "-m", "mpitrain", "doctor", "--comm"], mpi=mpi, env={"MPITRAIN_FT": "ulfm"}
    )
    assert refused.code == 2 and "MPITRAIN_FT=ulfm needs" in refused.stderr and "restart" in refused.stderr, (
        refused
    )
