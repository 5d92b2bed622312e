"""What a cluster does to jobs: the limit comes, a node is bad, a node dies. On the same four-node mini-cluster."""

from __future__ import annotations

import json
import subprocess

import pytest

from mpitrain.training.measure import same_model
from tests.sampling import sampled
from tests.slurm.cluster import ROOT
from tests.slurm.conftest import Site
from tests.slurm.test_templates import SMALL, fom

HELD = str(ROOT / "tests" / "slurm" / "held.py")

LOCKSTEP = "sync(servers=1)"
NUM_SAMPLES = 4 * 1438  # that held.py trains on
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]


def result_of(site: Site, run: str) -> dict:
    return json.loads((site.folder / run / "result.json").read_text())


def resumes(site: Site, run: str) -> list[int]:
    """The accepted samples from which the run has gone on, each time."""
    rows = map(json.loads, (site.folder / run / "metrics.jsonl").read_text().splitlines())
    return [row["samples"] for row in rows if row.get("event") == "resume"]


def wait_until_held(site: Site, job: str, run: str, num_workers: int = 2) -> None:
    """Until all workers stand at their sixtieth batch, which they leave only when they are told to end."""

    def held() -> bool:
        assert site.state(job) in ("PENDING", "RUNNING", "COMPLETING"), site.output(job)
        return len(list(site.folder.glob(f"{run}.held-*"))) == num_workers

    site.cluster.wait_for(held, f"the workers of job {job} to be held", 250)


@pytest.fixture(scope="module")
def whole(site: Site) -> str:
    """The run that nobody disturbs; submitted first, waited for where it is compared."""
    return site.sbatch(
        "--gpus-per-node=1", "slurm/multi-node.sbatch", HELD, "--strategy", LOCKSTEP, RUN_DIR="whole"
    )


@pytest.mark.parametrize(
    ("run", "strategy"),
    sampled([("again", LOCKSTEP), ("again-async", "async(servers=1)")], [("again", LOCKSTEP)]),
)
def test_usr1_requeues_and_the_run_goes_on_at_the_next_step(
    site: Site, whole: str, run: str, strategy: str
) -> None:
    """Lockstep ends in the bits of the run that was not disturbed; asynchronous, every sample is taken once."""
    words = ("--gpus-per-node=1", "slurm/multi-node.sbatch", HELD, "--strategy", strategy)
    job = site.sbatch(*words, RUN_DIR=run, HOLD=run)
    wait_until_held(site, job, run)
    site.run("scancel", "--batch", "--signal=USR1", job)
    output = site.wait(job, timeout_s=250)
    assert "requeue: restart 1 of at most 20" in output and fom(output)["status"] == "ok", output
    result = result_of(site, run)
    assert result["samples"] == NUM_SAMPLES and 0 < result["resumed_from"] < NUM_SAMPLES
    (samples,) = resumes(
        site, run
    )  # that it holds; it was named before the update after which it was written
    assert result["resumed_from"] <= samples < NUM_SAMPLES
    starts = [json.loads(line) for line in (site.folder / run / "legs.jsonl").read_text().splitlines()]
    first, last = [start["hosts"] for start in starts if "hosts" in start]
    assert result["num_starts"] == 2 and result["hosts"] == last and {len(first), len(last)} == {2}
    assert {start["job"] for start in starts if "job" in start} == {job}
    assert result["total_wall_s"] > result["wall_s"]
    assert result["node_hours"] == pytest.approx(2 * result["total_wall_s"] / 3600)
    assert (site.folder / run / "env-1.json").exists()
    left, right = result["staleness_identity"]
    assert left == right
    told = site.run("mpitrain", "slurm", "status", run)
    assert "ended with status=ok" in told and "restarts    1;" in told
    site.wait(whole, timeout_s=250)
    assert not resumes(site, "whole") and result_of(site, "whole")["samples"] == NUM_SAMPLES
    if strategy == LOCKSTEP:
        assert same_model(site.folder / "whole/model.safetensors", site.folder / run / "model.safetensors")


@pytest.mark.extended
def test_the_doctor_names_bad_nodes_and_tolerant_goes_on_without_them(site: Site, whole: str) -> None:
    """Four nodes, two of them spare: n2 lacks its device, n3 dies in the middle; n1 and n4 finish the run, in the bits
    of one that nobody disturbed."""
    site.wait(whole, timeout_s=250)  # it may stand on the nodes that are looked at
    cluster = site.cluster
    for gpu in (0, 1):
        cluster.gpu("n2", gpu).unlink()
    small = site.folder / "small-disk"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True
    )
    try:
        node = [
            "mpitrain",
            "doctor",
            "--node",
            "--speed-s",
            "0",
            "--devices",
            f"{cluster.root}/nodes/$SLURMD_NODENAME/gpu*",
        ]
        disks = [
            "--report",
            "doctor",
            "--disk",
            f"{site.folder}/$SLURMD_NODENAME-disk",
            "--min-free-gib",
            "0.01",
        ]
        for name in cluster.names:
            (site.folder / f"{name}-disk").symlink_to(
                small if name == "n3" and not mounted.returncode else "/tmp"
            )
        (site.folder / "doctor").mkdir()
        step = ["srun", "--mpi=none", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--gpus-per-node=1"]
        site.run(*step, "--kill-on-bad-exit=0", *node, *disks, code=4)
        collect = ["mpitrain", "doctor", "--collect", "doctor", "--hosts", " ".join(cluster.names)]
        told = site.run(*collect, "--failing", "failing.txt", code=4)
        assert "unfit: n2: devices: 0 of 1 device(s)" in told
        if not mounted.returncode:
            assert "unfit: n3: disk: 0.00 GiB free" in told
            assert (site.folder / "failing.txt").read_text() == "n2\nn3\n"
    finally:
        subprocess.run(["umount", str(small)], capture_output=True)
    het = ("--partition=cpu", ":", "--partition=gpu", "--nodes=1", "--nodelist=n2", "--gpus-per-node=1")
    unfit = site.sbatch(*het, "slurm/hetjob.sbatch", SMALL, "--strategy", LOCKSTEP, RUN_DIR="unfit")
    told = site.wait(unfit, "FAILED")
    assert "unfit: preflight failed, exit code 4: 1 unfit node(s)" in site.run(
        "mpitrain", "slurm", "status", "unfit"
    )
    assert "unfit: n2: devices: 0 of 1 device(s)" in told and "sbatch --exclude=n2 " in told
    words = ("--nodes=4", "--gpus-per-node=1", "slurm/tolerant.sbatch", HELD, "--strategy", LOCKSTEP)
    job = site.sbatch(
        *words, "--checkpoint-every", "500", RUN_DIR="tolerant", HOLD="tolerant", SPARE_NODES="2"
    )
    wait_until_held(site, job, "tolerant")
    cluster.wait_for(lambda: any((site.folder / "tolerant/checkpoints").glob("0*")), "a checkpoint", 60)
    cluster.kill_node("n3")
    try:
        output = site.wait(job, timeout_s=250)
    finally:
        cluster.start_node("n3")
        for gpu in (0, 1):
            cluster.gpu("n2", gpu).touch()
    assert "attempt 1 on n1 n3" in output and "attempt 2 on n1 n4" in output, output
    assert fom(output)["status"] == "ok"
    (resumed,) = resumes(site, "tolerant")
    assert 500 <= resumed < NUM_SAMPLES and result_of(site, "tolerant")["samples"] == NUM_SAMPLES
    assert same_model(site.folder / "whole/model.safetensors", site.folder / "tolerant/model.safetensors")
