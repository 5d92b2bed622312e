"""How long does a job stand still when a node of a real Slurm dies under it?

    python benchmarks/tolerance/node_outage.py [--kills 10] [--strategies allreduce async]

On the mini-cluster of the tests: three nodes with a rank each, `mpitrain launch --ft ulfm` in an allocation that
outlives a node, batches of 50 ms and 1 MB of gradients. Everything that runs on one node is killed at a random moment,
of `async()` a worker's, of `allreduce()` any. The outage of a survivor is the longest time from one of its batches to
the next, less what a batch takes in the same run; that of a kill is the longest of them. A kill is survived if the same
start of the run ends well with all samples, but those of an incomplete last step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.launching import search_path
from measuring.measurement import LAUNCHED, ROOT, Measurement

sys.path.insert(0, str(ROOT))
from tests.slurm.cluster import Cluster, why_not

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    wanted="an outage of 0.5 s in the median, of 2 s at most",
    depends=(*LAUNCHED, "mpitrain/slurm"),
    keys=("strategy",),
    figures=("median_s", "longest_s"),
    campaign=("python benchmarks/tolerance/node_outage.py",),
)
STRATEGIES = {"allreduce": "allreduce()", "async": "async()"}
NUM_SAMPLES, DEADLINE_S = 400, 120.0


class Run:
    """One run, of which a node is killed."""

    def __init__(self, cluster: Cluster, folder: Path, strategy: str):
        self.cluster, self.run_dir, self.notes = cluster, folder / "run", folder / "notes"
        self.notes.mkdir(parents=True)
        self.log = folder / "log"
        words = [
            "salloc",
            "-Q",
            "--no-kill",
            "--nodes=3",
            "--ntasks=3",
            sys.executable,
            "-m",
            "mpitrain",
            "launch",
        ]
        words += ["--ft", "ulfm", "-n", "3", "--max-restarts", "0", "train", str(HERE / "node_outage_job.py")]
        words += ["--strategy", strategy, "--run-dir", str(self.run_dir), "--checkpoint-every", "never"]
        env = {**os.environ, **cluster.env, "NOTES": str(self.notes), "PYTHONPATH": search_path(HERE)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=env)

    def batches(self) -> dict[str, list[float]]:
        """When each batch of each rank that computes has begun."""
        found = {path.name: path.read_text().split("\n")[:-1] for path in self.notes.iterdir()}
        return {rank: [float(at) for at in lines] for rank, lines in found.items() if lines}

    def wait_for_batches(self, number: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found := self.batches()) < 2 or min(map(len, found.values())) < number:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run has not come to batch {number}:\n{self.log.read_text()}")
            time.sleep(0.05)

    def judge(self, victim: str) -> tuple[bool, float]:
        """Whether it went on, and the outage."""
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        path = self.run_dir / "result.json"
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        num_samples = result.get("samples", 0) + result.get("samples_left_out", 0)
        survived = (result.get("status"), num_samples) == ("ok", NUM_SAMPLES)
        survived = survived and result.get("lost") == {victim: "died"}
        if not survived:
            print(f"not survived: {result}\n{self.log.read_text()[-3000:]}", flush=True)
        gaps = [
            [b - a for a, b in pairwise(times)] for rank, times in self.batches().items() if rank != victim
        ]
        return survived, max((max(each) - statistics.median(each) for each in gaps if each), default=0.0)


def kill_once(cluster: Cluster, folder: Path, strategy: str, dice: random.Random) -> tuple[bool, float]:
    """Begin a run, kill a node of it, and bring the node back when the run has ended."""
    run = Run(cluster, folder, strategy)
    run.wait_for_batches(20)
    victim = dice.choice(sorted(run.batches()))
    time.sleep(dice.uniform(0.0, 1.0))
    node = cluster.names[int(victim)]
    cluster.kill_node(node)
    try:
        return run.judge(victim)
    finally:
        cluster.start_node(node)
        cluster.wait_for(cluster.all_idle, "all nodes to be idle", timeout_s=90)


def main() -> None:
    """Parse the command line and run."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--kills", type=int, default=10, help="of each strategy")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no mini-cluster here: {reason}")
    dice, lines, all_survived = (
        random.Random(options.seed),
        [("strategy", "survived", "median s", "longest s")],
        True,
    )
    with tempfile.TemporaryDirectory(prefix="mini-slurm-", dir="/tmp") as scratch:
        root = Path(scratch, "cluster")
        root.mkdir()
        cluster = Cluster(root, num_nodes=3).up()
        try:
            for name in options.strategies:
                ends = []
                for number in range(options.kills):
                    folder = Path(scratch, f"{name}-{number}")
                    ends.append(kill_once(cluster, folder, STRATEGIES[name], dice))
                    print(
                        f"{STRATEGIES[name]}: survived {ends[-1][0]}, outage {ends[-1][1]:.3f} s", flush=True
                    )
                outages, survived = [outage for _, outage in ends], sum(survived for survived, _ in ends)
                row = {
                    "strategy": STRATEGIES[name], "kills": options.kills, "survived": survived, "seed": options.seed,
                    "outages_s": outages, "median_s": statistics.median(outages), "longest_s": max(outages),
                }  # fmt: skip
                write_row("node_outage", row)
                all_survived = all_survived and survived == options.kills
                counts = f"{survived} of {options.kills}"
                lines.append((row["strategy"], counts, f"{row['median_s']:.3f}", f"{row['longest_s']:.3f}"))
        finally:
            cluster.down()
    print(table(lines), flush=True)
    sys.exit(0 if all_survived else 1)


if __name__ == "__main__":
    main()
