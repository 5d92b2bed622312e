"""A site file's launch line against what is there: what Slurm prints is recorded, or comes from a stand-in."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.doctor import site
from mpitrain.doctor.site import examine_site, judge_srun, parse_mpi_list

# As Slurm 22.05 and Slurm 20.11 print it.
NEW = """\
MPI plugin types are...
\tnone
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\nsrun: pmix\n"


def test_the_plugins_of_a_slurm_are_read() -> None:
    assert parse_mpi_list(NEW) == ["none", "pmi2", "pmix", "pmix_v3", "pmix_v4"]
    assert parse_mpi_list(OLD) == ["cray_shasta", "none", "pmi2", "pmix", "pmix_v3"]
    assert parse_mpi_list("srun: error: resolve_ctls_from_dns_srv: failed\n") == []


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

    def faults(text: str) -> list[str]:
        file.write_text(text)
        return [check.detail for check in examine_site(file) if not check.ok]

    assert "module: command not found" in faults("module load openmpi\nLAUNCH=(srun)\n")[0]
    absent = faults("LAUNCH=(srun --mpi=pmix)\n")
    assert "no mpitrain on the PATH" in absent[0] and "there is no srun on the PATH" in absent[1]
    program(bin_, "mpitrain", "")
    assert "sets no LAUNCH" in faults("CONTAINER=()\n")[0]
    program(bin_, "srun", f"cat <<'END'\n{NEW}END")
    assert faults("LAUNCH=(srun --mpi=pmix)\n") == [] and faults("LAUNCH=(srun --mpi=pmix_v3 -K)\n") == []
    assert "no plugin cray_shasta" in faults("LAUNCH=(srun --mpi=cray_shasta)\n")[0]
    assert "no apptainer on the PATH" in faults("CONTAINER=(apptainer exec)\nLAUNCH=(srun --mpi=pmix)\n")[0]
    program(bin_, "mpirun", "echo 'HYDRA build details:'")
    assert "is mpich, and mpi4py loads openmpi" in faults("LAUNCH=(mpirun)\n")[0]
    program(bin_, "srun", "echo 'srun: error: no configuration' >&2; exit 1")
    assert "tells no plugin: srun: error: no configuration" in faults("LAUNCH=(srun --mpi=pmix)\n")[0]
    assert main(["doctor", "--site", str(file)]) == 4
    assert "UNFIT launcher" in capsys.readouterr().out
    assert main(["doctor", "--site", str(tmp_path / "none.sh")]) == 2
