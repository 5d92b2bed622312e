"""A node dies under srun, and the job goes on within its step."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import Site
from tests.slurm.test_lifetime import HELD, NUM_SAMPLES, fom, result_of, resumes, wait_until_held

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]


@pytest.mark.extended
def test_a_step_that_ends_with_its_node_is_started_again_on_the_nodes_that_are_left(site: Site) -> None:
    """At the level `restart`, without a spare node: with two workers in place of three, from the newest checkpoint."""
    words = ("--nodes=3", "--gpus-per-node=1", "slurm/tolerant.sbatch", HELD, "--checkpoint-every", "500")
    job = site.sbatch(*words, RUN_DIR="fewer", HOLD="fewer", SPARE_NODES="0", MIN_NODES="2")
    wait_until_held(site, job, "fewer", num_workers=3)
    checkpoints = site.folder / "fewer" / "checkpoints"
    site.cluster.wait_for(lambda: any(checkpoints.glob("0*/shard-0.json")), "a checkpoint", 60)
    dead = (site.folder / "fewer" / "hosts").read_text().split()[-1]
    site.cluster.kill_node(dead)
    try:
        told = site.wait(job)
    finally:
        site.cluster.start_node(dead)
    assert "attempt 2 on" in told and fom(told)["workers"] == "2", told
    assert result_of(site, "fewer")["samples"] == NUM_SAMPLES and resumes(site, "fewer")[0] >= 500, told


@pytest.mark.extended
@pytest.mark.parametrize(("strategy", "killed"), [("allreduce()", "1"), ("async()", "2")])
def test_the_others_go_on_without_a_node_that_dies_and_a_rank_that_does(
    site: Site, strategy: str, killed: str
) -> None:
    """All samples count, nothing is started again, and the dead ranks are named. The node's was held with the others;
    the one that dies alone, on a node that lives, does so some batches later."""
    run = strategy.rstrip("()")
    words = ("--nodes=3", "--gpus-per-node=1", "slurm/tolerant.sbatch", HELD, "--strategy", strategy)
    job = site.sbatch(
        *words, "--checkpoint-every", "never", "--inject", "kill(worker=1, at_step=80)",
        RUN_DIR=run, HOLD=run, SPARE_NODES="0", MPITRAIN_FT="ulfm",
    )  # fmt: skip
    wait_until_held(site, job, run, num_workers=3)
    hosts = (site.folder / run / "hosts").read_text().split()
    batch_host = site.cluster.ask("scontrol", "show", "job", job).partition("BatchHost=")[2].split()[0]
    dead = hosts[-1]
    assert dead != batch_host and hosts.count(dead) == 1
    site.cluster.kill_node(dead)
    (site.folder / f"{run}.go").touch()
    try:
        told = site.wait(job)
    finally:
        site.cluster.start_node(dead)
    result = result_of(site, run)
    assert fom(told)["status"] == "ok" and "attempt 2" not in told and resumes(site, run) == [], told
    lost = dict.fromkeys([str(len(hosts) - 1), killed], "died")
    assert (result["fault_tolerance"], result["lost"]) == ("ulfm", lost), told
    assert result["samples"] == NUM_SAMPLES, told
