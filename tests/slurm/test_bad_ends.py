"""What used to end badly on a real Slurm: signals before ranks exist, a cancelled job, a broken site file, GPUs that
nobody asked for, and the death of the first node. On the same four-node mini-cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.conftest import Site
from tests.slurm.test_lifetime import HELD, LOCKSTEP, NUM_SAMPLES, result_of, resumes, wait_until_held
from tests.slurm.test_templates import SMALL, fom

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]

# A command whose look at the node stands still on the job's first start.
WAITING = """\
#!/bin/bash
if [[ $1 == doctor && $2 == --node && ${{SLURM_RESTART_COUNT:-0}} == 0 && ${{SLURM_ARRAY_TASK_ID:-1}} == 1 ]]; then
    touch "preflight-$SLURM_JOB_ID"
    while :; do sleep 0.1; done
fi
exec {program} "$@"
"""


def notes(site: Site, run: str) -> list[list[str]]:
    """The job's log of its own steps, without the times."""
    return [line.split()[1:] for line in (site.folder / run / "job.log").read_text().splitlines()]


@pytest.mark.extended
def test_a_signal_before_ranks_exist_requeues_and_a_cancelled_job_stays_cancelled(site: Site) -> None:
    """Both stand still in the preflight when it comes. The first, a sweep's last task, is started again, alone,
    and trains, on one GPU of two."""
    waiting = site.folder / "waiting-bin" / "mpitrain"  # written once: the jobs begin at one moment
    waiting.parent.mkdir()
    waiting.write_text(WAITING.format(program=site.cluster.bin(site.python) / "mpitrain"))
    waiting.chmod(0o755)
    path = site.folder / "waiting.sh"
    path.write_text(f"source {site.cluster.site(site.python)}\nexport PATH={waiting.parent}:$PATH\n")
    (site.folder / "two.txt").write_text("--epochs 2\n--lr 2e-3\n")
    words = ("--gpus-per-node=1", "--array=0-1", "slurm/array-sweep.sbatch", "two.txt", SMALL)
    early = site.sbatch(*words, RUN_ROOT="sweep-early", MPITRAIN_SITE=str(path))
    words = ("--gpus-per-node=1", "slurm/single-node.sbatch", SMALL)
    cancelled = site.sbatch(*words, RUN_DIR="cancelled", MPITRAIN_SITE=str(path))
    for job in (early, cancelled):
        site.cluster.wait_for((site.folder / f"preflight-{job}").exists, f"job {job} to look at its node", 60)
    assert "1: starting: its nodes are looked at\n" in site.run(
        "mpitrain", "slurm", "status", "sweep-early/1"
    )
    site.run("scancel", "--batch", "--signal=USR1", f"{early}_1")
    site.run("scancel", cancelled)
    told = site.wait(cancelled, "CANCELLED")
    assert "asked to end while no ranks run" in told and "the job was cancelled" in told
    site.wait(f"{early}_0")
    told = site.wait(f"{early}_1")
    assert "requeue: restart 1 of at most 20: it was asked to end before its ranks had begun" in told
    assert fom(told)["status"] == "ok" and fom(told)["workers"] == "1"
    status = site.run("mpitrain", "slurm", "status", "sweep-early")
    assert "sweep-early: 2 runs: 2 ok\n" in status
    status = site.run("mpitrain", "slurm", "status", "sweep-early/1")
    assert (
        "ended with status=ok" in status
        and "restarts    1; the last: restart 1 of at most 20: it was" in status
    )
    status = site.run("mpitrain", "slurm", "status", "cancelled")
    assert "asked to end before its ranks had begun, exit code 75" in status and "CANCELLED" in status
    ends = [note[1:] for note in notes(site, "sweep-early/1") if note[2] in ("requeued", "ended")]
    assert ends == [["0", "requeued"], ["1", "ended", "0"]]
    assert [note[1:] for note in notes(site, "sweep-early/0") if note[2] == "ended"] == [["0", "ended", "0"]]


def test_a_site_file_that_fails_or_leads_nowhere_ends_the_job_and_no_node_is_blamed(site: Site) -> None:
    """Nor is anything staged into a folder that is named like a variable."""
    path = site.folder / "staging-nowhere.sh"
    path.write_text(
        f"source {site.cluster.site(site.python)}\nSTAGE=(data/digits) STAGE_TO='$NO_SUCH/mpitrain'\n"
    )
    nowhere = site.sbatch("--gpus-per-node=1", "slurm/single-node.sbatch", SMALL, MPITRAIN_SITE=str(path))
    path = site.folder / "broken.sh"
    path.write_text(f"source {site.cluster.site(site.python)}\nmodule load openmpi/99\n")
    told = site.wait(
        site.sbatch("--gpus-per-node=1", "slurm/single-node.sbatch", SMALL, MPITRAIN_SITE=str(path)), "FAILED"
    )
    assert "broken.sh: exit code 127, line 2: module load openmpi/99: nothing was started" in told
    assert "unfit" not in told
    told = site.wait(nowhere, "FAILED")
    assert "$NO_SUCH/mpitrain: $NO_SUCH is not set on n" in told and "FOM" not in told, told
    assert not list(site.folder.glob("$*"))


@pytest.mark.extended
def test_a_job_without_the_submitters_environment_trains_and_each_node_has_a_file(site: Site) -> None:
    """`sbatch --export=NONE`, the way of many centres: the site file is all that there is."""
    for name in ("jobs", "data"):
        (site.folder / "none" / name).parent.mkdir(exist_ok=True)
        (site.folder / "none" / name).symlink_to(site.folder / name)
    shutil.copytree(site.folder / "slurm", site.folder / "none" / "slurm")
    path = site.folder / "none" / "slurm" / "site.sh"
    path.write_text(f"source {site.cluster.site(site.python)}\nexport FILES_FROM_NODES=2\n")
    words = "--parsable --export=NONE --gpus-per-node=1 --time=10 slurm/multi-node.sbatch jobs/digits.py --epochs 1"
    job = site.run("bash", "-c", f"cd none && sbatch {words}").strip()
    site.cluster.wait_for(
        lambda: site.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"job {job}", 250
    )
    output = (site.folder / "none" / f"mpitrain-{job}.out").read_text()
    assert fom(output)["status"] == "missed" and fom(output)["nodes"] == "2", output  # after one epoch
    files = sorted((site.folder / "none" / "runs" / f"mpitrain-{job}" / "output").iterdir())
    assert len(files) == 2 and "FOM" in files[0].read_text()


def test_submit_hands_on_what_sbatch_takes_and_says_what_it_refuses(site: Site) -> None:
    site_file = str(site.cluster.site(site.python))
    told = site.run(
        *("mpitrain", "slurm", "submit", "--set", "partition=nope", "--no-check", "single-node", SMALL),
        code=2,
        MPITRAIN_SITE=site_file,
    )
    assert "sbatch refused the script" in told and "partition" in told and "Traceback" not in told
    (site.folder / "three.txt").write_text("# three\n--lr 1e-3\n\n--lr 2e-3\n--lr 3e-3 --epochs 1\n")
    words = ("--set", "gpus_per_node=1", "--set", "sweep=three.txt", "--set", "array=%2")
    more = ("--sbatch", "--hold", "--sbatch", "--exclude=n3 --comment='a word'", "array-sweep", SMALL)
    job = site.run("mpitrain", "slurm", "submit", *words, *more, MPITRAIN_SITE=site_file).split()[-1]
    try:
        facts = site.cluster.ask("scontrol", "show", "job", job)
        assert "ArrayTaskId=0-2%2" in facts and "ExcNodeList=n3" in facts and "Comment=a word" in facts, facts
        told = site.run("mpitrain", "slurm", "status", f"runs/mpitrain-{job}")
        assert f"runs/mpitrain-{job}: 3 runs: 3 waiting in the queue\n" in told, told
    finally:
        site.run("scancel", job)


GPUS = [
    (("--nodes=2", "--gpus-per-node=1"), "1"),
    (("--nodes=2", "--gres=gpu:1"), "1"),
    (("--nodes=2", "--gpus=2"), "1"),
    (("--nodes=2", "--gpus=4"), "2"),
    (("--nodes=1",), "1"),
]


def test_workers_are_as_many_as_the_gpus_that_were_asked_for(site: Site) -> None:
    """Nodes have two, and the batch shell of an exclusive job is shown both whatever it has asked for."""
    from mpitrain.slurm import script_parts

    script = site.folder / "gpus.sbatch"
    step = "srun --mpi=none --nodes=1 --ntasks=1 bash -c 'echo ranks see ${SLURM_GPUS_ON_NODE:-0}'"
    script.write_text(
        f"#!/bin/bash\nset -euo pipefail\n{script_parts.NODES}echo $WORKERS workers\n{step} || true\n"
    )
    jobs = [
        site.sbatch("--exclusive", "--mem=0", "--output=%x-%j.out", *words, str(script)) for words, _ in GPUS
    ]
    for job, (words, workers) in zip(jobs, GPUS, strict=True):
        told = site.wait(job)
        assert f"{workers} workers\n" in told, (words, told)
        if words[1:] and not words[1].startswith("--gpus="):  # of which a step on one node may have all
            assert f"ranks see {workers}\n" in told, (words, told)
    uneven = site.sbatch("--exclusive", "--nodes=2", "--gpus=3", "--output=%x-%j.out", str(script))
    assert "--gpus=3 does not go evenly into 2 nodes: ask for --gpus-per-node" in site.wait(uneven, "FAILED")


@pytest.mark.extended
def test_tolerant_is_requeued_when_its_first_node_dies(site: Site) -> None:
    """The batch script is on it: nothing is left of the job but its allocation, until a neighbour has it requeued."""
    words = ("--nodes=3", "--gpus-per-node=1", "slurm/tolerant.sbatch", HELD, "--strategy", LOCKSTEP)
    job = site.sbatch(*words, "--checkpoint-every", "500", RUN_DIR="first", HOLD="first", GUARD_S="1")
    wait_until_held(site, job, "first")
    checkpoints = site.folder / "first" / "checkpoints"
    site.cluster.wait_for(lambda: any(checkpoints.glob("0*/shard-0.json")), "a checkpoint", 60)
    dead = site.cluster.ask("scontrol", "show", "job", job).partition("BatchHost=")[2].split()[0]
    site.cluster.kill_node(dead)
    try:
        told = site.wait(job, timeout_s=250)
    finally:
        site.cluster.start_node(dead)
    assert f"the first node {dead} is down" in told and fom(told)["status"] == "ok", told
    assert result_of(site, "first")["samples"] == NUM_SAMPLES and resumes(site, "first")[0] >= 500
    answers = map(json.loads, Path(site.folder, "first", "restarts.jsonl").read_text().splitlines())
    assert [answer["cause"] for answer in answers] == ["node died"]
    assert [note[:4] for note in notes(site, "first") if note[2] in ("requeued", "ended")] == [
        [job, "0", "requeued", "by"],
        [job, "1", "ended", "0"],
    ]
