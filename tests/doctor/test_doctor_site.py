"""A site file's launch line against what is there: what Slurm prints is recorded, or comes from a stand-in."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.doctor import site
from mpitrain.doctor.site import examine_site, judge_rank, judge_srun
from mpitrain.launch.srun_plugins import parse_mpi_list
from tests.launch.test_srun_plugins import NEW


@pytest.mark.parametrize(
    ("line", "default", "library", "ok", "said"),
    [
        ("srun --mpi=pmix", None, "openmpi", True, "Slurm has"),
        ("srun --mpi pmix_v4", None, "openmpi", True, "Slurm has"),
        ("srun --mpi=pmix", None, None, True, "Slurm has"),
        ("srun --mpi=cray_shasta", None, "mpich", False, "no plugin cray_shasta; it has none, pmi2"),
        ("srun --mpi=pmi2", None, "mpich", True, "Slurm has"),
        ("srun --mpi=pmi2", None, "openmpi", False, "mpi4py loads openmpi here, which wants --mpi=pmix"),
        ("srun", "pmix", "openmpi", True, "Slurm has"),
        ("srun", "none", "openmpi", False, "asks for no MPI plugin"),
        ("srun", None, "openmpi", False, "asks for no MPI plugin"),
    ],
)
def test_a_launch_line_against_the_plugins(
    line: str, default: str | None, library: str | None, ok: bool, said: str
) -> None:
    check = judge_srun(line.split(), parse_mpi_list(NEW), default, library)
    assert check.ok == ok and said in check.detail, check


def told(library: str, launcher: str | None) -> dict[str, object]:
    return {"mpi": {"library": library}, "launch": {"launcher": launcher}}


RANK = json.dumps(told("Open MPI v5.0.11, package: x", "Open MPI"), indent=2)


@pytest.mark.parametrize(
    ("library", "launcher", "said"),
    [
        ("Open MPI v5.0.11, package: x", "Open MPI", ""),
        ("Open MPI v5.0.11, package: x", "PMIx", ""),
        ("MPICH Version:      5.0.2\nmore", "PMI (MPICH's Hydra or srun)", ""),
        ("Intel(R) MPI Library 2021.18", "PMIx", ""),
        ("Some MPI", "Flux", ""),
        ("Open MPI v5.0.11, package: x", "PMI (MPICH's Hydra or srun)", "each of several would be alone"),
        ("MPICH Version:      5.0.2", "Open MPI", "loads MPICH Version: 5.0.2 and was started by Open MPI"),
        ("MPICH Version:      5.0.2", None, "finds no launcher"),
    ],
)
def test_a_ranks_mpi_and_its_launcher_belong_together(library: str, launcher: str | None, said: str) -> None:
    check = judge_rank("LINE -n 1", told(library, launcher))
    assert check.ok == (not said) and said in check.detail, check


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_site_file_is_sourced_and_what_it_names_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "site.sh"
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("bash", "cat"):  # and no srun that may be installed here
        (bin_ / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(bin_))
    monkeypatch.setattr(site, "installed_library", lambda: ("openmpi", None))
    for name in ("SLURM_JOB_ID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)

    def faults(text: str) -> list[str]:
        file.write_text(text)
        return [check.detail for check in examine_site(file) if not check.ok]

    assert "module: command not found" in faults("module load openmpi\nLAUNCH=(srun)\n")[0]
    absent = faults("LAUNCH=(srun --mpi=pmix)\n")
    assert "no mpitrain on the PATH" in absent[0] and "there is no srun on the PATH" in absent[1]
    program(bin_, "mpitrain", f"""test "$*" = env && cat <<'END'\n{RANK}\nEND""")
    assert "sets no LAUNCH" in faults("CONTAINER=()\n")[0]
    program(bin_, "srun", f"cat <<'END'\n{NEW}END")
    assert faults("LAUNCH=(srun --mpi=pmix)\n") == [] and faults("LAUNCH=(srun --mpi=pmix_v3 -K)\n") == []
    assert "no plugin cray_shasta" in faults("LAUNCH=(srun --mpi=cray_shasta)\n")[0]
    assert "no apptainer on the PATH" in faults("CONTAINER=(apptainer exec)\nLAUNCH=(srun --mpi=pmix)\n")[0]
    program(bin_, "mpirun", "echo 'HYDRA build details:'")
    assert "is mpich, and mpi4py loads openmpi" in faults("LAUNCH=(mpirun)\n")[0]
    # A rank is started with the very words; outside of an allocation srun itself is asked what it says of them.
    program(
        bin_,
        "srun",
        f"""case "$*" in *bogus*) echo 'srun: unrecognized option bogus
Try "srun --help" for more information' >&2; exit 1;; *--test-only*) exit 0;; esac\ncat <<'END'\n{NEW}END""",
    )
    assert "unrecognized option bogus" in faults("LAUNCH=(srun --mpi=pmix --bogus)\n")[0]
    assert "unrecognized option bogus" in faults("LAUNCH=(srun --mpi=pmix)\nBIND=(--bogus)\n")[0]
    starts = """case "$1" in --version) echo mpirun '(Open MPI)' 5;; -n) shift 2; exec "$@";;
*) echo "unknown option $1" >&2; exit 7;; esac"""
    program(bin_, "mpirun", starts)
    assert faults("LAUNCH=(mpirun)\n") == [] and faults("LAUNCH=(mpirun)\nCONTAINER=(cat -)\n") != []
    assert (
        "-n 1 mpitrain env ended with 7: unknown option --line-buffer"
        in faults("LAUNCH=(mpirun --line-buffer)\n")[0]
    )
    program(bin_, "mpitrain", "echo 'mpi4py finds no MPI library' >&2; exit 2")
    assert "ended with 2: mpi4py finds no MPI library" in faults("LAUNCH=(mpirun)\n")[0]
    program(bin_, "srun", "echo 'srun: error: no configuration' >&2; exit 1")
    assert "tells no plugin: srun: error: no configuration" in faults("LAUNCH=(srun --mpi=pmix)\n")[0]
    assert main(["doctor", "--site", str(file)]) == 4
    assert "UNFIT launcher" in capsys.readouterr().out
    assert main(["doctor", "--site", str(tmp_path / "none.sh")]) == 2
