"""MPICH under srun, where MPI tells nobody of a death: workers are missed by their silence, a server by its."""

from __future__ import annotations

import pytest

from tests.ranks import find_mpi
from tests.slurm.cluster import ROOT
from tests.slurm.conftest import Site
from tests.slurm.test_lifetime import result_of, resumes
from tests.slurm.test_templates import SMALL

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]
NUM_SAMPLES = 1438
MORTAL = str(ROOT / "tests" / "slurm" / "mortal.py")


def launch(site: Site, run: str, *words: str, **env: str) -> str:
    """One server and three workers on a node, by `mpitrain launch`; what was printed. Its exit code is to be 0."""
    python, _ = find_mpi("mpich")
    command = [str(python), "-m", "mpitrain", "launch", "--ft", "heartbeat", "-n", "4", "train", *words]
    return site.run("salloc", "--nodes=1", "--ntasks=4", *command, "--run-dir", run, mpi="mpich", **env)


@pytest.mark.extended
def test_workers_that_die_are_missed_and_the_run_ends_with_all_samples(site: Site) -> None:
    """One fails and says so, the validator, so somebody inherits; one is killed and missed by its silence."""
    faults = ("--inject", "raise(worker=0, at_step=3)", "--inject", "kill(worker=1, at_step=5)")
    output = launch(site, "heartbeat", SMALL, "--strategy", "sync()", *faults, "--heartbeat-s", "15")
    result = result_of(site, "heartbeat")
    assert (result["status"], result["fault_tolerance"]) == ("ok", "heartbeat"), output
    assert result["samples"] == 2 * NUM_SAMPLES, output
    assert (result["lost"]["1"], result["lost"]["2"]) == ("died", "silent"), output
    assert resumes(site, "heartbeat") == [], output


@pytest.mark.extended
def test_a_server_that_dies_is_missed_and_the_run_goes_on_from_its_checkpoint(site: Site) -> None:
    words = (MORTAL, "--strategy", "async()", "--checkpoint-every", "500", "--heartbeat-s", "8")
    output = launch(site, "mortal", *words, MORTAL="mortal")
    result = result_of(site, "mortal")
    assert "has had no answer of rank 0 (server) for 8 s" in output
    assert (result["status"], result["samples"]) == ("ok", 4 * NUM_SAMPLES), output
    assert resumes(site, "mortal")[0] >= 500, output
