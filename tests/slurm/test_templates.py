"""Every template on a real Slurm: four slurmd on this machine, one sbatch line each, digits to status=ok."""

from __future__ import annotations

import json

import pytest

from mpitrain.slurm import KINDS
from tests.slurm.cluster import ROOT
from tests.slurm.conftest import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(580)]
SMALL = str(ROOT / "tests" / "slurm" / "small.py")
ASYNC = "async(servers=1)"


def fom(output: str) -> dict[str, str]:
    """The last FOM line as a dictionary."""
    line = [line for line in output.splitlines() if line.startswith("FOM ")][-1]
    return dict(word.split("=", 1) for word in line.split()[1:])


def test_each_template_trains(site: Site) -> None:
    """The heterogeneous job and the single node's stage their data in, and read it on the node they are on."""
    staging = site.folder / "staging.sh"
    staging.write_text(f"source {site.cluster.site(site.python)}\nSTAGE=(data/digits)\n")
    staged = {"MPITRAIN_SITE": str(staging), "READS": str(site.folder / "reads")}
    (site.folder / "reads").mkdir()
    (site.folder / "sweep.txt").write_text(
        "# the rates\n--lr 2e-3\n\n--lr 1e-3 --strategy 'softsync(updates=1, servers=1)'\n"
    )
    het = (":", "--partition=gpu", "--nodes=2", "--gpus-per-node=1")
    one = ("--gpus-per-node=1",)
    jobs = {
        "single-node": site.sbatch(*one, "slurm/single-node.sbatch", SMALL, "--strategy", ASYNC, **staged),
        "array-sweep": site.sbatch(
            *one, "--array=0-1", "slurm/array-sweep.sbatch", "sweep.txt", SMALL, RUN_ROOT="sweep"
        ),
        "hetjob": site.sbatch(
            "--partition=cpu",
            *het,
            "slurm/hetjob.sbatch",
            SMALL,
            "--strategy",
            ASYNC,
            RUN_DIR="het",
            SRUN_GRACE_S="20",
            **staged,
        ),
        "benchmark": site.sbatch(
            *one, "--nodes=2", "slurm/benchmark.sbatch", SMALL, STEPS="5", RUN_DIR="bench"
        ),
    }
    outputs = {name: site.wait(job) for name, job in jobs.items() if name != "array-sweep"}
    assert fom(outputs["single-node"])["status"] == "ok" and fom(outputs["single-node"])["nodes"] == "1"
    told = fom(outputs["hetjob"])
    assert (told["status"], told["nodes"], told["workers"], told["servers"]) == ("ok", "3", "2", "1")
    ranks = json.loads((site.folder / "het" / "result.json").read_text())["ranks"]
    assert [rank["role"] for rank in ranks] == ["server", "worker", "worker"]
    assert "3 of 3 node(s) fit" in outputs["hetjob"]
    reads = {path: path.read_text().splitlines() for path in (site.folder / "reads").iterdir()}
    assert len(reads) == 3  # the workers: two of the heterogeneous job, one of the single node's
    for path, shards in reads.items():
        node = path.name.partition("-")[0]
        own = site.cluster.root / "nodes" / node / "tmp" / "mpitrain" / "digits"
        assert shards and all(shard.startswith(f"{own.resolve()}/") for shard in shards), (node, shards)
    left = [
        path for name in site.cluster.names for path in (site.cluster.root / "nodes" / name).rglob("digits")
    ]
    assert left == []  # the staged copies go with the job
    for count in (1, 2):
        result = json.loads((site.folder / "bench" / f"nodes-{count}" / "result.json").read_text())
        assert (result["status"], result["workers"], result["nodes"]) == ("ok", count, count)
    site.wait(jobs["array-sweep"])
    for index, strategy in enumerate(("allreduce()", "softsync(updates=1)")):
        result = json.loads((site.folder / "sweep" / str(index) / "result.json").read_text())
        assert (result["status"], result["strategy"]) == ("ok", strategy)


@pytest.mark.extended  # `make test-mpich` starts every template's ranks so
def test_several_nodes_train_under_mpich(site: Site) -> None:
    words = ("--gpus-per-node=1", "slurm/multi-node.sbatch", SMALL, "--strategy", ASYNC)
    told = fom(site.wait(site.sbatch(*words, mpi="mpich")))
    assert (told["status"], told["nodes"], told["workers"], told["servers"]) == ("ok", "2", "2", "1")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sbatch_takes_what_is_rendered(site: Site, kind: str) -> None:
    sweep = site.folder / f"{kind}.txt"
    sweep.write_text("--lr 2e-3\n--lr 1e-3\n")
    sizes = ["--set", "nodes=2", "--set", "gpus_per_node=1", "--set", f"sweep={sweep.name}"]
    script = site.folder / f"{kind}.rendered"
    job = ["jobs/digits.py", "--epochs", "3"]
    job += ["--strategy", "async(servers=1)"] if kind == "hetjob" else []  # it has nodes for servers
    script.write_text(site.run("mpitrain", "slurm", "render", *sizes, kind, *job))
    assert "to start at" in site.run("sbatch", "--test-only", str(script))
