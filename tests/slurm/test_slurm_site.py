"""The site file, and the lines by which ranks start with it: every launcher, outside and inside a container.

No Slurm and no MPI: `srun`, `mpirun`, `mpiexec` and `ibrun` are stand-ins that print their words, so that what a
template would run is compared whole.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.reporting.report import write_json
from mpitrain.slurm import LAUNCHERS, render_site, script_parts

ROOT = Path(__file__).resolve().parents[2]
DEAF = """bash -c 'trap "" USR1; exec "$@"' rank"""
TRAIN = "mpitrain train 'my job.py' --run-dir run --resume auto"
SRUN = (
    "--nodes=2 --ntasks=3 --distribution=arbitrary --cpus-per-task=4 --overlap --kill-on-bad-exit=1 --wait=60 "
    "--unbuffered --cpu-bind=cores --mem-bind=local --gpu-bind=none"
)
# What is run, and which variables go with it, for two ranks on n1 and one on n2.
LINES = {
    "openmpi": (f"srun --mpi=pmix {SRUN}", "SLURM_HOSTFILE=run/hosts SRUN_CPUS_PER_TASK=4"),
    "mpich": (f"srun --mpi=pmi2 {SRUN}", "SLURM_HOSTFILE=run/hosts SRUN_CPUS_PER_TASK=4"),
    "cray-mpich": (
        f"srun --mpi=cray_shasta {SRUN}",
        "MPICH_GPU_SUPPORT_ENABLED=1 SLURM_HOSTFILE=run/hosts SRUN_CPUS_PER_TASK=4",
    ),
    "intel-mpi": (
        f"srun --mpi=pmi2 {SRUN}",
        "I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so SLURM_HOSTFILE=run/hosts SRUN_CPUS_PER_TASK=4",
    ),
    "mpirun": ("mpirun -n 3 --hostfile run/hosts --bind-to numa", "SRUN_CPUS_PER_TASK=4"),
    "mpiexec": ("mpiexec -n 3 -f run/hosts -bind-to numa", "SRUN_CPUS_PER_TASK=4"),
    "ibrun": ("ibrun -n 3 -f run/hosts -bind-to numa", "SRUN_CPUS_PER_TASK=4"),
}
STAND_IN = """\
#!/bin/bash
printf '%q ' "${0##*/}" "$@"
echo
for name in I_MPI_PMI_LIBRARY MPICH_GPU_SUPPORT_ENABLED SLURM_HOSTFILE SRUN_CPUS_PER_TASK; do
    if [[ -v $name ]]; then printf '%s=%s ' "$name" "${!name}"; fi
done
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS"
"""


def launched(tmp_path: Path, site: str, ends: str = "", code: int = 0) -> list[str]:
    """What a template's `launch` runs with this site file. The launcher ends with the bash `ends`, the template with
    exit code `code`."""
    for name in ("srun", "mpirun", "mpiexec", "ibrun"):
        (tmp_path / name).write_text(STAND_IN + ends)
        (tmp_path / name).chmod(0o755)
    for name in ("mpitrain", "apptainer"):  # asked for their version
        (tmp_path / name).write_text("#!/bin/bash\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "hosts").write_text("n1\nn1\nn2\n")
    start = f"MPITRAIN_SITE=site.sh\n{script_parts.START}note() {{ :; }}\n"
    call = f'RUN_DIR=run COPY=()\nset -- "my job.py"\n{script_parts.DEAF}{script_parts.TRAIN.replace("finish", "exit")}'
    (tmp_path / "site.sh").write_text(site)
    (tmp_path / "script").write_text(f"{start}{script_parts.SIGNALS}{script_parts.LAUNCH}{call}")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_ON_NODE": "8"}
    run = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == code, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("image", ["", "/images/my image.sif"])
@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name not in ("flux", "pals")])
def test_the_line_that_starts_ranks(tmp_path: Path, launcher: str, image: str) -> None:
    line, variables = LINES[launcher]
    inside = f"apptainer exec --nv --bind {tmp_path} {shlex.quote(image)} " if image else ""
    said, told = launched(tmp_path, render_site(launcher, image))
    assert shlex.split(said) == shlex.split(f"{line} {DEAF} {inside}{TRAIN}")
    assert told == f"{variables} OMP_NUM_THREADS=4"


def test_under_heartbeat_srun_leaves_the_others_alone_and_the_result_decides(tmp_path: Path) -> None:
    """srun's exit code is that of a dead worker, whatever became of the run; an earlier result says nothing."""
    site = render_site("mpich").replace("# export MPITRAIN_FT", "export MPITRAIN_FT")
    (tmp_path / "run").mkdir()
    for code in (0, 3):
        write_json(tmp_path / "new", {"accuracy": 0.9, "exit_code": code, "status": "?"})
        said, _ = launched(tmp_path, site, "cp new run/result.json; exit 137", code)
        fate = SRUN.replace("--kill-on-bad-exit=1 --wait=60", "--kill-on-bad-exit=0 --no-kill --wait=0")
        assert shlex.split(said) == shlex.split(f"srun --mpi=pmi2 {fate} {DEAF} {TRAIN}")
    launched(tmp_path, site, "exit 137", 137)


def test_the_site_file_is_what_it_gives_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change to `mpitrain/slurm/site.py`: mpitrain slurm site > slurm/site.sh"""
    assert main(["slurm", "site"]) == 0
    assert capsys.readouterr().out == render_site() == (ROOT / "slurm" / "site.sh").read_text()


def test_launchers_differ_by_the_lines_of_their_own() -> None:
    default, cray = render_site().splitlines(), render_site("cray-mpich", "a.sif").splitlines()
    changed = [(one, other) for one, other in zip(default, cray, strict=True) if one != other]
    assert changed == [
        ("LAUNCH=(srun --mpi=pmix) # Open MPI 4 or 5", "# LAUNCH=(srun --mpi=pmix) # Open MPI 4 or 5"),
        (
            "# LAUNCH=(srun --mpi=cray_shasta); export MPICH_GPU_SUPPORT_ENABLED=1 # Cray MPICH",
            "LAUNCH=(srun --mpi=cray_shasta); export MPICH_GPU_SUPPORT_ENABLED=1 # Cray MPICH",
        ),
        ("CONTAINER=()", "# CONTAINER=()"),
        (
            '# CONTAINER=(apptainer exec --nv --bind "$PWD" mpitrain.sif)',
            'CONTAINER=(apptainer exec --nv --bind "$PWD" a.sif)',
        ),
    ]


def test_every_site_file_is_clean_bash(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: apt-get install shellcheck")
    paths = []
    for launcher in LAUNCHERS:
        for image in ("", "my image.sif"):
            paths.append(tmp_path / f"{launcher}{len(image)}")
            paths[-1].write_text(render_site(launcher, image))
            assert subprocess.run(["bash", "-n", paths[-1]]).returncode == 0
    run = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_an_unknown_launcher_is_answered_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean 'cray-mpich'"):
        render_site("craympich")
    with pytest.raises(UsageError, match="without line ends"):
        render_site(image="a\nb")


def test_a_signal_while_the_site_file_is_read_is_heard(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text("LAUNCH=(srun)\nkill -USR1 $$\n")
    parts = script_parts.START + script_parts.SIGNALS + script_parts.CHECK_NODES
    end = "nothing_runs() { echo heard; exit 75; }\nRUN_DIR=.\ncheck_nodes n1\n"
    (tmp_path / "script").write_text(parts + end)
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "MPITRAIN_SITE": "site.sh"}
    run = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 75 and "heard" in run.stdout, run


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("A=1\nmodule load openmpi/99\nLAUNCH=(srun)\n", "exit code 127, line 2: module load openmpi/99"),
        (
            "source no-such-venv/bin/activate\nLAUNCH=(srun)\n",
            "site.sh: line 1: no-such-venv/bin/activate: No such file",
        ),
        ("LAUNCH=(srun\n", "exit code 2"),
        ("DOCTOR=()\n", "site.sh does not say how ranks start"),
        ("LAUNCH=(srun); PATH=/usr/bin:/bin\n", "mpitrain does not run on n7 after site.sh"),
        (
            "LAUNCH=(srun) CONTAINER=(no-such-apptainer exec a.sif)\n",
            "no-such-apptainer exec a.sif mpitrain does not",
        ),
        (None, "site.sh: exit code 1"),
    ],
)
def test_a_broken_site_file_ends_the_job_with_a_word(tmp_path: Path, site: str | None, said: str) -> None:
    """Before any node is looked at; a file without fault goes on."""
    if site is not None:
        (tmp_path / "site.sh").write_text(site)
    (tmp_path / "script").write_text(f"{script_parts.START}\necho went on\n")
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "MPITRAIN_SITE": "site.sh",
        "SLURMD_NODENAME": "n7",
    }
    run = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert run.returncode != 0 and said in run.stderr and "went on" not in run.stdout, run
    (tmp_path / "site.sh").write_text("[[ -e nosuch ]] && A=1\nfalse || true\necho $UNSET\nLAUNCH=(srun)\n")
    run = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and "went on" in run.stdout, run


def test_init_writes_the_folder_of_the_checkout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "init"]) == 0
    patterns = ("*.sbatch", "*.sh", "other/*")
    there = {path.relative_to(ROOT) for pattern in patterns for path in (ROOT / "slurm").glob(pattern)}
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == there
    assert all(path.read_bytes() == (ROOT / path).read_bytes() for path in written)
    Path("slurm/site.sh").write_text("mine")
    Path("slurm/tolerant.sbatch").unlink()
    capsys.readouterr()
    assert main(["slurm", "init"]) == 2
    assert "slurm/single-node.sbatch, slurm/multi-node.sbatch" in capsys.readouterr().err
    assert Path("slurm/site.sh").read_text() == "mine" and not Path("slurm/tolerant.sbatch").exists()


def test_templates_name_the_site_file_of_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "init", "a/batch/", "--launcher", "mpich", "--image", "slurm/x.sif"]) == 0
    assert Path("a/batch/site.sh").read_text() == render_site("mpich", "slurm/x.sif").replace(
        "slurm/site.sh;", "a/batch/site.sh;"
    ).replace("slurm/single-node.sbatch", "a/batch/single-node.sbatch")
    for path in (path for path in Path("a/batch").rglob("*.*") if path.name != "site.sh"):
        text = path.read_text()
        assert "SITE=${MPITRAIN_SITE:-a/batch/site.sh}" in text and " slurm/" not in text, path
    for folder, why in (
        ("a b", "batch scripts name their folder"),
        ("a/batch/site.sh", "File exists; name another folder"),
    ):
        assert main(["slurm", "init", folder]) == 2
        assert why in capsys.readouterr().err
