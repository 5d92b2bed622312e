"""What a cluster does to jobs: the limit comes, a node is bad, a node dies. On the same four-node mini-cluster."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.slurm.conftest import Site
from tests.slurm.test_templates import SMALL, fom

LOCKSTEP = "sync(servers=1)"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(290)]


def seen(site: Site, job: str, pattern: str) -> bool:
    """Whether the job's output has a line that matches; an ended job fails at once."""
    found = re.search(pattern, site.output(job), re.MULTILINE)
    assert found or site.state(job) in ("PENDING", "RUNNING", "COMPLETING"), site.output(job)
    return bool(found)


def test_usr1_requeues_and_the_run_goes_on_at_the_next_step(site: Site) -> None:
    job = site.sbatch(
        *("--gpus-per-node=1", "slurm/multi-node.sbatch", SMALL, "--strategy", LOCKSTEP, "--epochs", "8"),
        *("--inject", "slow(worker=0, factor=8)"),
        RUN_DIR="again",
    )
    site.cluster.wait_for(lambda: seen(site, job, "^.* validation epoch 1 "), "the first epoch", 120)
    site.run("scancel", "--batch", "--signal=USR1", job)
    site.cluster.wait_for(lambda: seen(site, job, "requeue: restart 1 of at most 20"), "the requeue", 60)
    (mark,) = [int(path.name) for path in (site.folder / "again" / "checkpoints").iterdir()]
    assert "it will go on" in site.run("mpitrain", "slurm", "status", "again")
    told = fom(site.wait(job))
    assert told["status"] == "ok"
    steps = [json.loads(line) for line in (site.folder / "again" / "metrics.jsonl").read_text().splitlines()]
    resumed = [row for row in steps if row.get("event") == "resume"]
    assert resumed, [row.get("event") for row in steps][:40]
    assert f"{mark}" in json.dumps(resumed[0])
    assert "ended with status=ok" in site.run("mpitrain", "slurm", "status", "again")


def test_the_doctor_names_bad_nodes_and_tolerant_goes_on_without_them(site: Site) -> None:
    """Four nodes, two of them spare: n2 lacks its device, n3 dies in the middle; n1 and n4 finish the run."""
    cluster = site.cluster
    cluster.gpu("n2", 0).unlink()
    small = site.folder / "small-disk"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True
    )
    try:
        node = ["mpitrain", "doctor", "--node", "--devices", f"{cluster.root}/nodes/$SLURMD_NODENAME/gpu*"]
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
    job = site.sbatch(
        *(
            "--nodes=4",
            "--gpus-per-node=1",
            "slurm/tolerant.sbatch",
            SMALL,
            "--strategy",
            LOCKSTEP,
            "--epochs",
            "8",
        ),
        *("--inject", "slow(worker=0, factor=8)", "--checkpoint-every", "500"),
        RUN_DIR="tolerant",
        SPARE_NODES="2",
    )
    cluster.wait_for(lambda: seen(site, job, "^.* validation epoch 2 "), "the second epoch", 120)
    cluster.kill_node("n3")
    try:
        output = site.wait(job, timeout_s=150)
    finally:
        cluster.start_node("n3")
        cluster.gpu("n2", 0).touch()
    assert "attempt 1 on n1 n3" in output and "attempt 2 on n1 n4" in output, output
    assert fom(output)["status"] == "ok"
    rows = [
        json.loads(line) for line in (site.folder / "tolerant" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["samples"] >= 500 for row in rows if row.get("event") == "resume"] == [True]
