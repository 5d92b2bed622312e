"""Batch scripts for PBS, LSF and Flux: the templates are the renderer's own, compared whole, and clean bash; and they
run, with stand-ins for the commands of the batch system, for the launcher and for mpitrain, which write down how they
were called. None of the three systems can be had here."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.slurm import SYSTEMS, render, render_site
from mpitrain.slurm.batch_systems import OTHER_KINDS
from mpitrain.slurm.script import Script, make
from tests.ranks import find_mpi

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [system for system in SYSTEMS if system != "slurm"]


@pytest.mark.parametrize("system", OTHERS)
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_the_templates_are_what_render_gives(kind: str, system: str) -> None:
    """After a change: mpitrain slurm render --set system=SYSTEM KIND > slurm/other/KIND.SYSTEM"""
    text = render(Script(kind, system=system))
    assert (ROOT / "slurm" / "other" / f"{kind}.{system}").read_text() == text
    # neither a variable nor a command of Slurm's, nor a placeholder; the command `mpitrain slurm` may-requeue is ours
    assert not re.search(r"SLURM_|\b(sbatch|scontrol|squeue)\b|@\w+@", text), text


def test_there_is_no_template_that_nobody_renders() -> None:
    here = {path.name for path in (ROOT / "slurm" / "other").iterdir()}
    assert here == {f"{kind}.{system}" for kind in OTHER_KINDS for system in OTHERS}


FILLED = {
    "nodes": 3,
    "gpus_per_node": 2,
    "time": "1-2",
    "account": "phys",
    "partition": "long",
    "signal_s": 90,
}
HEADS = {
    "pbs": [
        "#PBS -N mpitrain -l walltime=26:00:00",
        "#PBS -j oe -r y",
        "#PBS -A phys",
        "#PBS -q long",
        "#PBS -l select=3:ngpus=2 -l place=scatter:excl",
    ],
    "lsf": [
        "#BSUB -J mpitrain -W 26:00",
        "#BSUB -o %J.out",
        "#BSUB -wa URG -wt 2",
        '#BSUB -r -Q "75"',
        "#BSUB -P phys",
        "#BSUB -q long",
        '#BSUB -n 3 -R "span[ptile=1]" -x',
        '#BSUB -gpu "num=2"',
    ],
    "flux": [
        "# flux: --job-name=mpitrain --time-limit=1560m",
        "# flux: --output=mpitrain-{{id}}.out",
        "# flux: --bank=phys",
        "# flux: --queue=long",
        "# flux: --nodes=3 --exclusive",
    ],
}


@pytest.mark.parametrize("system", OTHERS)
def test_what_is_filled_in_stands_in_the_head(system: str) -> None:
    script = make("multi-node", system=system, job="jobs/my job.py", options=("--lr", "1"), **FILLED)
    lines = render(script).splitlines()
    sentinel = {"pbs": "#PBS", "lsf": "#BSUB", "flux": "# flux:"}[system]
    assert [line for line in lines if line.startswith(sentinel)] == HEADS[system]
    assert "set -- 'jobs/my job.py' --lr 1" in lines


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-2", 93600), ("1-2:3", 93780), ("0-0:5:7", 307)],
)
def test_limits_are_read_as_sbatch_does(time: str, seconds: int) -> None:
    text = render(Script("multi-node", system="pbs", time=time))
    hours, minutes, rest = map(int, re.findall(r"walltime=(\d+):(\d+):(\d+)", text)[0])
    assert (hours * 60 + minutes) * 60 + rest == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "hetjob", "system": "pbs"}, "hetjob is for Slurm; for pbs there are single-node"),
        (
            {"kind": "multi-node", "system": "lsf", "qos": "long"},
            "qos='long': there is no such option for lsf",
        ),
        ({"kind": "multi-node", "system": "flx"}, "no batch system 'flx'; did you mean 'flux'"),
    ],
)
def test_what_a_system_has_no_word_for_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        render(make(**options))


@pytest.mark.parametrize("tool", ["bash", "shellcheck"])
def test_scripts_are_clean(tool: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}: apt-get install {tool}")
    for system in OTHERS:
        text = render(make("multi-node", system=system, job="jobs/digits.py", **FILLED))
        (tmp_path / f"filled.{system}").write_text(text)
    paths = [*sorted((ROOT / "slurm" / "other").iterdir()), *sorted(tmp_path.iterdir())]
    for each in [[path] for path in paths] if tool == "bash" else [paths]:
        run = subprocess.run(["bash", "-n", *each] if tool == "bash" else [tool, *each], capture_output=True)
        assert run.returncode == 0, (run.stdout + run.stderr).decode()


# What each stand-in does, besides writing its words into `calls`, one call a line.
_MPITRAIN = """
case "$1 $2" in
"doctor --collect") : >"${@: -1}" ;;
"train "*) cp plan "${@: -1}" ;;
"slurm may-requeue") exit "${MAY_NOT:-0}" ;;
esac
"""
_LAUNCHER = """
case "$*" in
*" doctor --node "*) ;;
*" train "*)
    if [[ -v WAIT ]]; then trap 'touch "$RUN_DIR/REQUEUE"; exit 75' USR1; while :; do sleep 0.05; done; fi
    if [[ ${ENDS:-0} == 75 ]]; then touch "$RUN_DIR/REQUEUE"; fi
    exit "${ENDS:-0}"
    ;;
esac
"""
_QSTAT = """
echo "Job Id: 7.server
    Resource_List.place = scatter:excl
    Resource_List.select = 2:ngpus=2
    Resource_List.walltime = ${LIMIT:-08:00:00}"
"""
_FLUX = """
case "$1 $2" in
"job id") echo 7 ;;
"job timeleft") echo 28800.5 ;;
"hostlist "*) echo n1 n2 ;;
esac
"""


class Stage:
    """A folder with a site file, stand-ins on the PATH, and two nodes."""

    def __init__(self, folder: Path, launch: str):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "slurm").mkdir()
        (folder / "slurm" / "site.sh").write_text(
            f"{launch}\nBIND=(--bound)\nCONTAINER=()\nSTAGE=()\nDOCTOR=()\n"
        )
        (folder / "nodes").write_text("n1\nn1\nn2\nn2\n")
        (folder / "plan").write_text("n1\nn1\nn2\nn2\n")
        for name, text in {
            "mpitrain": _MPITRAIN,
            "mpirun": _LAUNCHER,
            "mpiexec": _LAUNCHER,
            "qstat": _QSTAT,
            "qsub": "",
            "flux": _FLUX + _LAUNCHER,
        }.items():
            self.command(f"bin/{name}", text)

    def command(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(exist_ok=True, parents=True)
        word = file.name
        file.write_text(f'#!/bin/bash\n[[ "$*" == --version ]] || echo "{word} $*" >>"$CALLS"\n{text}')
        file.chmod(0o755)

    def run(
        self, system: str, code: int = 0, words: str = "job.py --lr 1", timeout_s: float = 60, **env: str
    ) -> list[str]:
        """The calls of one job."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        calls.touch()
        template = ROOT / "slurm" / "other" / f"multi-node.{system}"
        ours = {
            "pbs": {"PBS_JOBID": "7.server", "PBS_JOBNAME": "mine", "PBS_NODEFILE": "nodes", "TRAIN": words},
            "lsf": {"LSB_JOBID": "7", "LSB_JOBNAME": "mine", "LSB_DJOB_HOSTFILE": "nodes", "TRAIN": words},
            "flux": {"FLUX_ENCLOSING_ID": "f7"},
        }[system]
        clean = {"HOME": str(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        run = subprocess.run(
            ["bash", str(template), *(words.split() if system == "flux" else [])],
            cwd=self.folder,
            env={**clean, "CALLS": str(calls), "RUN_DIR": "run", "OMP_NUM_THREADS": "3", **ours, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        self.said = run.stdout + run.stderr
        assert run.returncode == code, self.said
        return calls.read_text().splitlines()


MPIRUN = "-x PATH -x OMP_NUM_THREADS -x GLIBC_TUNABLES"
TRAINED = 'bash -c trap "" USR1; exec "$@" rank mpitrain train job.py --lr 1 --run-dir run --resume auto'
LINES = {
    ("pbs", "mpirun"): (
        f"mpirun -n 2 {MPIRUN} --map-by ppr:1:node --hostfile run/each-n1 ",
        f"mpirun -n 4 {MPIRUN} --hostfile run/hosts --oversubscribe --bound ",
    ),
    ("lsf", "mpiexec"): ("mpiexec -n 2 -ppn 1 -f run/each-n1 ", "mpiexec -n 4 -f run/hosts --bound "),
    ("pbs", "pals"): (
        "mpiexec -n 2 --ppn 1 --hostfile run/each-n1 ",
        "mpiexec -n 4 --ppn 2 --hostfile run/hosts.once --bound ",
    ),
    ("flux", "flux"): (
        "flux run -n 2 --nodes=2 --exclusive --requires=host:n1,n2 ",
        (
            "flux run -n 4 --nodes=2 --exclusive --requires=host:n1,n2 --taskmap=hostfile:run/hosts "
            "-o gpu-affinity=off --bound "
        ),
    ),
}


@pytest.mark.parametrize(("system", "launcher"), LINES)
def test_a_job_looks_at_its_nodes_places_and_trains(system: str, launcher: str, tmp_path: Path) -> None:
    lines = {"pals": f"PATH={tmp_path}/opt/pals/bin:$PATH; LAUNCH=(mpiexec)", "flux": "LAUNCH=(flux run)"}
    stage = Stage(tmp_path, lines.get(launcher, f"LAUNCH=({launcher})"))
    stage.command("opt/pals/bin/mpiexec", _LAUNCHER)
    calls = [
        call for call in stage.run(system) if not call.startswith(("qstat", "flux job", "flux hostlist"))
    ]
    each, ranks = LINES[system, launcher]
    single = {call for call in calls if " doctor --node " in call}
    assert each + "mpitrain doctor --node --report run/doctor" in single
    others = [call for call in calls if call not in single]
    assert others == [
        "mpitrain doctor --collect run/doctor --hosts n1 n2 --failing run/failing_nodes.txt",
        "mpitrain train job.py --lr 1 --dry-run --gpus-per-node 4 --hosts n1 n2 --write-hosts run/hosts",
        ranks + TRAINED,
    ]
    assert (tmp_path / "run" / "each-n2").read_text() == "n2\n"  # asked again on its own
    assert (
        stage.run(system, code=3, ENDS="3")[-1] == ranks + TRAINED
    )  # a missed target ends the job with its code


def test_a_run_that_was_asked_to_stop_goes_on_in_another_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "LAUNCH=(mpirun)")
    may = "mpitrain slurm may-requeue run --max-restarts 20"
    assert stage.run("pbs", code=75, ENDS="75")[-3:] == [
        may,
        "qstat -f -w 7.server",
        (
            "qsub -W depend=afterany:7.server -l select=2:ngpus=2 -l place=scatter:excl -l walltime=08:00:00 "
            "-v RUN_DIR,TRAIN run/batch-script"
        ),
    ]
    assert (tmp_path / "run" / "batch-script").read_text() == (
        ROOT / "slurm/other/multi-node.pbs"
    ).read_text()
    assert stage.run("pbs", code=75, ENDS="75", MAY_NOT="1")[-1] == may
    # LSF itself starts a job again that ends with 75, so one that may not run again ends with 1
    assert stage.run("lsf", code=75, ENDS="75")[-1] == may
    assert stage.run("lsf", code=1, ENDS="75", MAY_NOT="1")[-1] == may
    (tmp_path / "slurm" / "site.sh").write_text(
        "LAUNCH=(flux run)\nBIND=()\nCONTAINER=()\nSTAGE=()\nDOCTOR=()\n"
    )
    assert stage.run("flux", code=75, ENDS="75")[-1] == (
        "flux --parent batch --nodes=2 --dependency=afterany:f7 --env=RUN_DIR=run run/batch-script job.py --lr 1"
    )


def test_ranks_are_asked_to_stop_before_the_limit_of_pbs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "LAUNCH=(mpirun)")
    calls = stage.run(
        "pbs", code=75, WAIT="1", LIMIT="00:05:02", TRAIN="job.py '--strategy async(servers=1)'"
    )
    assert any("train job.py --strategy async(servers=1) --run-dir" in call for call in calls)
    assert calls[-1].startswith("qsub -W depend=afterany:7.server")


@pytest.mark.parametrize(
    ("launch", "plan", "said"),
    [
        (
            "PATH=$HOME/opt/slurm/bin:$PATH; LAUNCH=(srun)",
            "n1\n",
            "site.sh starts ranks by srun, and this is no job",
        ),
        ("LAUNCH=(mpiexec); LAUNCHER=pals", "n1\nn2\nn1\n", "PALS starts equally many ranks on each node"),
        (
            "LAUNCH=(mpiexec); LAUNCHER=pals",
            "n1\nn2\nn1\nn2\n",
            "PALS starts equally many ranks on each node",
        ),
        ("LAUNCH=(mpirun); false", "n1\n", "exit code 1, line 1: false: nothing was started"),
    ],
)
def test_what_cannot_start_says_why(launch: str, plan: str, said: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path, launch)
    stage.command("opt/slurm/bin/srun", "")
    (tmp_path / "plan").write_text(plan)
    stage.run("pbs", code=2)
    assert said in stage.said


def test_a_template_without_a_job_says_how_it_is_used(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "LAUNCH=(mpirun)")
    for system in OTHERS:
        calls = stage.run(system, code=1, words="", **({} if system == "flux" else {"TRAIN": ""}))
        assert "usage: " in stage.said and f"slurm/other/multi-node.{system}" in stage.said
        assert not any("mpitrain" in call for call in calls)


@pytest.mark.parametrize("launcher", ["flux", "pals"])
def test_site_files_for_their_launchers(launcher: str, tmp_path: Path) -> None:
    path = tmp_path / "site.sh"
    path.write_text(render_site(launcher))
    ask = 'source "$1"; printf "%s|" "${LAUNCH[*]}" "${BIND[*]}"'
    run = subprocess.run(["bash", "-ec", ask, "-", str(path)], capture_output=True, text=True, check=True)
    assert (
        run.stdout
        == {
            "flux": "flux run|-o cpu-affinity=per-task|",
            "pals": "mpiexec --line-buffer|--cpu-bind numa|",
        }[launcher]
    )


def test_submit_is_for_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    job = str(ROOT / "jobs" / "digits.py")
    assert main(["slurm", "submit", "--set", "system=pbs", "multi-node", job]) == 2
    assert "submit is for sbatch" in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.parametrize(
    ("system", "mpi", "launcher"), [("lsf", "openmpi", "mpirun"), ("pbs", "mpich", "mpiexec")]
)
def test_a_script_trains_under_a_real_launcher(system: str, mpi: str, launcher: str, tmp_path: Path) -> None:
    """The whole script on this host: its batch system is played by its variables, everything else is real."""
    python, program = find_mpi(mpi)
    stage = Stage(tmp_path, f"LAUNCH=({program.parent / launcher})")
    shutil.rmtree(tmp_path / "bin")
    stage.command("bin/mpitrain", f'exec "{python}" -m mpitrain "$@"')
    site = (tmp_path / "slurm" / "site.sh").read_text()
    site = site.replace("--bound", f"{'-' if mpi == 'openmpi' else ''}-bind-to none")
    (tmp_path / "slurm" / "site.sh").write_text(site.replace("DOCTOR=()", "DOCTOR=(--gpus 0 --speed-s 0)"))
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\n")
    words = f"{ROOT / 'tests' / 'slurm' / 'small.py'} --synthetic --steps 6 --strategy 'async(servers=1)'"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "^ofi"}
    env = {"WORKERS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **root}
    stage.run(system, words=words, timeout_s=250, **env)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["workers"], result["servers"]) == ("ok", 2, 1)
    assert "1 of 1 node(s) fit" in stage.said
    batch = json.loads((tmp_path / "run" / "env.json").read_text())["batch"]
    assert (batch["system"], batch["job"]) == (system, {"lsf": "7", "pbs": "7.server"}[system])
