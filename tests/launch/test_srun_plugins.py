"""By which plugin srun has ranks find each other: Slurm's lists are recorded, and version texts are the MPIs' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.launch import srun_plugins
from mpitrain.launch.command import Asked, launch_command
from mpitrain.launch.discover import Launcher, find_launcher
from mpitrain.launch.srun_plugins import choose, intel_libraries, kind_of, parse_mpi_list
from tests.launch.test_launch import Install, install, on_path  # noqa: F401

# As Slurm 22.05, Slurm 20.11 and Debian's 22.05 print it; the last one is no Cray.
NEW = """\
MPI plugin types are...
\tnone
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\nsrun: pmix\n"
DEBIAN = ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4")


def test_the_plugins_of_a_slurm_are_read() -> None:
    assert parse_mpi_list(NEW) == ["none", "pmi2", "pmix", "pmix_v3", "pmix_v4"]
    assert parse_mpi_list(OLD) == ["cray_shasta", "none", "pmi2", "pmix", "pmix_v3"]
    assert parse_mpi_list("srun: error: resolve_ctls_from_dns_srv: failed\n") == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost", "openmpi"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "mpich"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.26 (ANL base 3.4a2)\nMPI BUILD", "cray-mpich"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "intel-mpi"),
        ("MVAPICH Version : 3.0\n", "mpich"),
        ("MVAPICH2 Version      :\t2.3.7\n", "mpich"),
        ("Another MPI 1.0", None),
        ("", None),
    ],
)
def test_an_mpi_is_known_by_what_it_says_of_itself(text: str, kind: str | None) -> None:
    assert kind_of(text) == kind


@pytest.mark.parametrize(
    ("kind", "plugins", "environ", "chosen"),
    [
        ("openmpi", DEBIAN, {}, "pmix"),
        ("openmpi", ("none", "pmi2", "pmix_v3", "pmix_v4"), {}, "pmix_v4"),
        ("mpich", DEBIAN, {}, "pmi2"),
        ("mpich", ("none", "pmix"), {}, "pmix"),
        ("cray-mpich", DEBIAN, {}, "cray_shasta"),
        ("cray-mpich", ("none", "pmi2", "pmix"), {}, "pmi2"),
        ("intel-mpi", DEBIAN, {}, "pmi2"),
        ("intel-mpi", ("none", "pmix"), {}, "pmix"),
        ("intel-mpi", DEBIAN, {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmix.so"}, "pmix"),
        ("intel-mpi", DEBIAN, {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so.0"}, "pmi2"),
        ("intel-mpi", DEBIAN, {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi.so"}, ""),
        ("cray-mpich", (), {}, "cray_shasta"),  # a Slurm that does not tell
    ],
)
def test_the_plugin_is_one_that_slurm_has_and_the_mpi_speaks(
    kind: str, plugins: tuple[str, ...], environ: dict[str, str], chosen: str
) -> None:
    assert choose(kind, plugins, environ) == chosen
    launcher = Launcher("srun", "/usr/bin/srun", None, kind=kind, plugins=plugins)
    command, _ = launch_command(Asked(launcher, 2, ["PROG"], 2, {"SLURM_JOB_ID": "9", **environ}))
    assert command[4:-1] == ([f"--mpi={chosen}"] if chosen else [])
    own = Asked(launcher, 2, ["PROG"], 2, {"SLURM_JOB_ID": "9", **environ}, host_args=["--mpi=other"])
    assert launch_command(own)[0][4:-1] == ["--mpi=other"]


def test_where_slurm_has_none_of_them_the_way_out_is_named() -> None:
    with pytest.raises(
        UsageError, match="loads openmpi.*--mpi=pmix, and this Slurm has none, pmi2.*--host-args"
    ):
        choose("openmpi", ("none", "pmi2"), {})


def test_intel_mpi_is_told_of_slurms_library_unless_the_user_has(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/slurm").mkdir(parents=True)
    library = tmp_path / "lib/slurm/libpmi2.so"
    library.touch()
    found = intel_libraries(str(tmp_path / "bin/srun"))
    assert str(library) in found
    launcher = Launcher("srun", "srun", "mpich", kind="intel-mpi", plugins=DEBIAN, pmi_libraries=found)
    asked = Asked(launcher, 2, ["PROG"], 2, {"SLURM_JOB_ID": "9"})
    assert launch_command(asked)[1]["I_MPI_PMI_LIBRARY"] == str(library)
    environ = {"SLURM_JOB_ID": "9", "I_MPI_PMI_LIBRARY": "/own/libpmi2.so"}
    assert "I_MPI_PMI_LIBRARY" not in launch_command(Asked(launcher, 2, ["PROG"], 2, environ))[1]


def test_srun_and_the_mpi_are_asked_inside_an_allocation(
    tmp_path: Path,
    install: Install,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    srun = install("path/srun", NEW)
    (tmp_path / "prefix/lib/libmpi.so.12").touch()  # MPICH's, Cray's and Intel's have one name
    monkeypatch.setattr(srun_plugins, "loaded_kind", lambda python: "cray-mpich")
    found = find_launcher("auto", on_path(tmp_path, SLURM_JOB_ID="1"))
    plugins = ("none", "pmi2", "pmix", "pmix_v3", "pmix_v4")
    assert found == Launcher("srun", srun, "mpich", kind="cray-mpich", plugins=plugins)
    monkeypatch.setattr(srun_plugins, "loaded_kind", lambda python: None)
    assert find_launcher("auto", on_path(tmp_path, SLURM_JOB_ID="1")).kind == "mpich"


def test_hydra_inside_an_allocation_shows_ranks_one_way_to_find_each_other() -> None:
    """It starts its proxies by srun, and MPICH's ranks refuse to start where they find PMIx beside its own."""
    hydra = Launcher("mpich", "mpiexec", "mpich")
    assert launch_command(Asked(hydra, 2, ["PROG"], 2, {"SLURM_JOB_ID": "9"}))[1]["SLURM_MPI_TYPE"] == "none"
    for environ in ({}, {"SLURM_JOB_ID": "9", "SLURM_MPI_TYPE": "pmi2"}):
        assert "SLURM_MPI_TYPE" not in launch_command(Asked(hydra, 2, ["PROG"], 2, environ))[1]
