"""One mini-cluster for all tests of this folder: four nodes with two fake GPUs, up in a second, down at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import OWN, find_mpi, kind_of, warm_environment
from tests.slurm.cluster import ROOT, Cluster, why_not


@dataclass(frozen=True)
class Site:
    """The cluster, and a directory to submit from: a checkout's `slurm/`, `jobs/` and data, but no package."""

    cluster: Cluster
    folder: Path
    python: Path

    def sbatch(self, *words: str, mpi: str = OWN, **env: str) -> str:
        """Submit; the job id."""
        site = {"MPITRAIN_SITE": str(self.cluster.site(find_mpi(mpi)[0]))}
        return self.run("sbatch", "--parsable", *words, mpi=mpi, **{**site, **env}).strip()

    def run(self, *words: str, code: int = 0, mpi: str = OWN, **env: str) -> str:
        """Run a command from the folder and return its output, both streams. Open MPI's ranks of its jobs are warm."""
        full = {**os.environ, **self.cluster.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        # MPICH's ranks failed in MPI_Init when they were forked under Slurm; not looked into
        if kind_of(find_mpi(mpi)[1]) == "openmpi":
            full = warm_environment(full, self.folder / "ranks")
        full["PATH"] = f"{self.cluster.bin(self.python)}:{self.python.parent}:{full['PATH']}"
        run = subprocess.run(
            words,
            cwd=self.folder,
            env=full,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert run.returncode == code, f"exit code {run.returncode}, wanted {code}\n{run.stdout}"
        return run.stdout

    def state(self, job: str) -> str:
        """Slurm's word for the job's state."""
        text = self.cluster.ask("scontrol", "--oneliner", "show", "job", job)
        return text.partition("JobState=")[2].split()[0]

    def wait(self, job: str, state: str = "COMPLETED", timeout_s: float = 250) -> str:
        """Until the job has ended; its output. Fails with it if the state is another than wanted."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            self.cluster.wait_for(lambda: self.state(job) in ended, f"job {job}", timeout_s)
        except RuntimeError as error:  # ask the ranks for their stacks
            self.run("scancel", "--signal=ABRT", job)
            self.cluster.wait_for(lambda: self.state(job) in ended, f"job {job}", 20)
            raise AssertionError(f"{error}\n{self.output(job)}") from None
        assert self.state(job) == state, f"job {job} is {self.state(job)}\n{self.output(job)}"
        return self.output(job)

    def output(self, job: str) -> str:
        """What the job has printed so far."""
        paths = sorted(self.folder.glob(f"*-{job}.out"))
        return "".join(path.read_text(errors="replace") for path in paths)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A running mini-cluster; skips with the reason where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    find_mpi()
    with tempfile.TemporaryDirectory(prefix="mini-slurm-") as scratch:
        cluster = Cluster(Path(scratch, "cluster"), num_nodes=4, gpus_per_node=2)
        cluster.root.mkdir()
        folder = Path(scratch, "work")
        shutil.copytree(ROOT / "slurm", folder / "slurm")
        shutil.copytree(ROOT / "jobs", folder / "jobs")
        found = Site(cluster.up(), folder, Path(sys.executable))
        try:
            cluster.site(found.python)
            found.run(str(found.python), "-m", "mpitrain", "data", "pack", "digits", "data/digits")
            yield found
        finally:
            cluster.down()
