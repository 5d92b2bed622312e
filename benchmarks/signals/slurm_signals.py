"""Does a run keep what it has trained when a real Slurm ends it? scancel, requeue, preemption with no grace and with 90
s, the time limit and a suspension, each under four strategies, with checkpoints that take ten seconds to write.

    python benchmarks/signals/slurm_signals.py [--events scancel ...] [--record]

On the mini-cluster of the tests, with Slurm's default KillWait of 30 s: a node for each strategy, all at a time. An end
is right if there is a checkpoint that is newer than all that were written before the signal, and `result.json` asks for
another start; where the job is started again, if it goes on from there; and after a suspension, if the same start goes
on and nobody was taken for hung.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.launching import search_path
from measuring.measurement import LAUNCHED, ROOT, Measurement

from mpitrain.checkpoint.parts import newest

sys.path.insert(0, str(ROOT))
from tests.slurm.cluster import Cluster, why_not

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    wanted="every run goes on from a checkpoint newer than the signal",
    depends=(*LAUNCHED, "mpitrain/slurm"),
    keys=("event",),
    campaign=("python benchmarks/signals/slurm_signals.py",),
)

STRATEGIES = {
    "allreduce": "allreduce()",
    "localsgd": "localsgd()",
    "async": "async(servers=1)",
    "ring": "decentralized(topology='ring')",
}
EVENTS = ("scancel", "requeue", "preemption, no grace", "preemption, 90 s", "time limit", "suspension")
CONF = """\
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low0 Nodes={names} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=INFINITE State=UP
PartitionName=low90 Nodes={names} PriorityTier=1 PreemptMode=REQUEUE GraceTime=90 MaxTime=INFINITE State=UP
PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
SUSPENDED_S, WATCHDOG_S = 60.0, 30.0
DEADLINE_S = 400.0


class Job:
    """One job of the template on a node of its own."""

    def __init__(self, cluster: Cluster, folder: Path, event: str, name: str, node: str):
        self.cluster, self.event, self.name, self.node = cluster, event, name, node
        self.run_dir = folder / f"{event}-{name}".replace(" ", "-").replace(",", "")
        partition = {"preemption, no grace": "low0", "preemption, 90 s": "low90"}.get(event, "gpu")
        limit = "4" if event == "time limit" else "60"
        words = ["sbatch", "--parsable", f"--partition={partition}", f"--nodelist={node}", f"--time={limit}"]
        words += ["--gpus-per-node=2", f"--output={self.run_dir}.out", "slurm/single-node.sbatch"]
        words += [str(HERE / "slow_checkpoint_job.py"), "--strategy", STRATEGIES[name], "--quiet"]
        words += ["--watchdog-s", str(WATCHDOG_S)]
        site = str(cluster.site())
        env = {**os.environ, **cluster.env, "MPITRAIN_SITE": site, "RUN_DIR": str(self.run_dir)}
        env["PYTHONPATH"] = search_path(HERE)
        env["PATH"] = f"{cluster.root}/bin-openmpi:{env['PATH']}"
        run = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        self.id, self.mark, self.why = run.stdout.strip(), 0, ""

    def state(self) -> str:
        """Slurm's word."""
        text = self.cluster.ask("scontrol", "--oneliner", "show", "job", self.id)
        return text.partition("JobState=")[2].split()[0]

    def newest(self) -> int:
        """Samples at the newest checkpoint."""
        found = newest(self.run_dir) if (self.run_dir / "checkpoints").exists() else None
        return found.checkpoint_at if found else 0

    def result(self) -> dict[str, Any]:
        path = self.run_dir / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def resumed_from(self) -> list[int]:
        """The samples from which it has gone on, each time."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row["samples"] for row in map(json.loads, lines) if row.get("event") == "resume"]

    def output(self) -> str:
        path = Path(f"{self.run_dir}.out")
        return path.read_text(errors="replace") if path.exists() else ""

    def send(self) -> None:
        """What happens to it."""
        self.mark = self.newest()
        if self.event == "scancel":
            self.cluster.ask("scancel", self.id)
        elif self.event == "suspension":
            self.cluster.ask("scontrol", "suspend", self.id)
        elif self.event == "requeue":
            self.cluster.ask("scontrol", "requeue", self.id)
        elif self.event.startswith("preemption"):
            words = ["--partition=high", f"--nodelist={self.node}", "--exclusive", "--mem=0", "--time=5"]
            self.cluster.ask("sbatch", "--parsable", *words, f"--output={os.devnull}", "--wrap=sleep 5")

    def is_over(self) -> bool:
        """Whether what was waited for has come: the end, the next start, or progress after a suspension."""
        if self.event == "scancel":  # Slurm calls it cancelled while it still writes
            log = self.run_dir / "job.log"
            return log.exists() and " ended " in log.read_text()
        if self.event == "suspension":
            return self.newest() > self.mark + 1 or self.state() != "RUNNING"
        return bool(self.resumed_from()) or self.state() in ("CANCELLED", "FAILED", "TIMEOUT", "COMPLETED")

    def judge(self) -> dict[str, Any]:
        """The row of the results."""
        found = {"event": self.event, "strategy": STRATEGIES[self.name], "before": self.mark}
        resumed = self.resumed_from()
        if self.event == "suspension":
            right = self.newest() > self.mark and not resumed and "no progress" not in self.output()
            return found | {"after": self.newest(), "resumed_from": resumed, "right": right}
        result = self.result()
        if self.event == "scancel":
            right = result.get("status") == "requeue" and self.mark < self.newest() <= result.get(
                "samples", 0
            )
            return found | {"after": self.newest(), "resumed_from": resumed, "right": right}
        right = len(resumed) == 1 and resumed[0] > self.mark
        return found | {
            "after": resumed[0] if resumed else self.newest(),
            "resumed_from": resumed,
            "right": right,
        }


def until(condition: Callable[[], bool], what: str) -> bool:
    """Whether it came in time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.5)
    print(f"waited in vain for {what}", flush=True)
    return False


def one_event(cluster: Cluster, folder: Path, event: str, names: list[str]) -> list[dict[str, Any]]:
    """All strategies at a time."""
    folder.mkdir(exist_ok=True)
    jobs = [Job(cluster, folder, event, name, node) for name, node in zip(names, cluster.names)]
    rows: list[dict[str, Any]] = []
    until(lambda: all(job.newest() for job in jobs), "a first checkpoint")
    for job in jobs:
        job.send()
    if event == "suspension":
        time.sleep(SUSPENDED_S)
        for job in jobs:
            cluster.ask("scontrol", "resume", job.id)
    for job in jobs:
        until(job.is_over, f"{event} of {job.name}")
        rows.append(job.judge())
        print(rows[-1], flush=True)
        if not rows[-1]["right"]:
            print(job.output()[-3000:], flush=True)
    for job in jobs:
        subprocess.run(["scancel", "--signal=KILL", "--full", job.id], env={**os.environ, **cluster.env})
        subprocess.run(["scancel", job.id], env={**os.environ, **cluster.env})
    until(cluster.all_idle, "nodes to be idle")
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--kills", type=int, default=1, help="of each strategy by each event")
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no mini-cluster here: {reason}")
    with tempfile.TemporaryDirectory(prefix="mini-slurm-", dir="/tmp") as scratch:
        root, folder = Path(scratch, "cluster"), Path(scratch, "runs")
        root.mkdir()
        folder.mkdir()
        names = ",".join(f"n{index + 1}" for index in range(len(STRATEGIES)))
        cluster = Cluster(root, num_nodes=len(STRATEGIES), conf=CONF.format(names=names)).up()
        try:
            rows = []
            for turn in range(options.kills):
                for event in options.events:
                    ends = one_event(cluster, folder / str(turn), event, options.strategies)
                    write_row("slurm_signals", {"event": event, "ends": ends})
                    rows += ends
        finally:
            cluster.down()
    counts = {"ends": len(rows), "right": sum(row["right"] for row in rows)}
    cells = [
        (row["event"], row["strategy"], str(row["before"]), str(row["after"]), str(row["right"]))
        for row in rows
    ]
    print(table([("event", "strategy", "before", "after", "right"), *cells]), flush=True)
    sys.exit(0 if counts["right"] == counts["ends"] else 1)


if __name__ == "__main__":
    main()
