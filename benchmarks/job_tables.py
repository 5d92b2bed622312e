"""How fast is each job, and when does it reach a loss, under six strategies, on a few workers and on many virtual ones?

    .venv/bin/python benchmarks/job_tables.py [--jobs digits cnn ...] [--workers 1,2,4] [--virtual 1,8,64] [--rounds 1]

Each job is measured by `mpitrain bench`, on less data than the job file packs by default, and to a target that this
much data reaches. A row says how many processes the machine had to run meanwhile (its load average of five minutes).
Virtual workers take the times of batches measured on this host, over an ideal network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring.common import make_parser, table, write_row
from measuring.measurement import LAUNCHED, VIRTUAL, Command, Measurement

MEASUREMENT = Measurement(
    depends=(*LAUNCHED, *VIRTUAL, "mpitrain/search", "jobs"),
    keys=("job", "train_args"),
    figures=("rows.*.samples_per_second",),
    commands=(Command("python benchmarks/job_tables.py", minutes=11),),
)

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("allreduce", "sync()", "async()", "ssp(bound=3)", "localsgd(period=4)", "decentralized()")
# What is packed, options of training, and what makes the job smaller.
JOBS: dict[str, tuple[str, str, dict[str, str]]] = {
    "digits": ("digits", "--epochs 6 --target accuracy=0.95", {}),
    "cnn": ("cnn.py:shapes", "--epochs 3 --target accuracy=0.8", {"CNN_SAMPLES": "1500"}),
    "pixelcnn": ("digits", "--epochs 3 --target bits_per_dimension<2.1", {}),
    "charnn": (
        "topics", "--epochs 1 --target accuracy=0.3", {"CHARNN_HIDDEN": "48", "CHARNN_LAYERS": "2"},
    ),
    "nmt": ("nmt.py:numbers", "--epochs 2 --target sentences=0.8", {"NMT_SAMPLES": "4000"}),
    "ranking": (
        "ranking.py:clicks", "--epochs 1 --target gap_closed=0.6",
        {"RANKING_SAMPLES": "30000", "RANKING_ROWS": "16384"},
    ),
}  # fmt: skip
FOLDERS = {"cnn": "shapes", "pixelcnn": "digits", "charnn": "topics", "nmt": "numbers"}
KEPT = (
    "strategy", "workers", "virtual", "batch_size", "samples_per_second", "spread", "efficiency", "to_target",
    "num_met", "num_runs", "metrics", "staleness_mean", "num_bytes", "refused",
)  # fmt: skip


def mpitrain(folder: Path, environment: dict[str, str], *words: str) -> None:
    """Run the command; what it says goes to our stderr."""
    subprocess.run(
        [sys.executable, "-m", "mpitrain", *words],
        cwd=folder, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"}, check=False, stdout=sys.stderr,
    )  # fmt: skip


def pack(folder: Path, name: str) -> None:
    """The job's data."""
    source, _, environment = JOBS[name]
    text = str(ROOT / "jobs" / source) if ".py:" in source else source
    mpitrain(folder, environment, "data", "pack", text, f"data/{FOLDERS.get(name, name)}")


def measured(name: str, options: Any) -> dict[str, Any]:
    """The row of one job."""
    _, words, environment = JOBS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pack(folder, name)
        mpitrain(
            folder, environment, "bench", str(ROOT / "jobs" / f"{name}.py"), "--strategies", *STRATEGIES,
            *(["--workers", options.workers] if options.workers else []), "--virtual-workers", options.virtual,
            "--repeats", str(options.rounds), "--train-args", words, "--run-dir", "bench",
        )  # fmt: skip
        found = json.loads((folder / "bench" / "bench.json").read_text())
    rows = [{key: row[key] for key in KEPT if key in row} for row in found["rows"]]
    return {
        "kind": "job", "load": round(os.getloadavg()[1], 1), "job": name, "rounds": options.rounds,
        "train_args": words, "environment": environment,
        "metric": found["metric"], "target": found["target"], "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument(
        "--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS), help="which (default: all)"
    )
    parser.add_argument("--workers", default="1,2,4", help='under MPI, "" for none (default: 1,2,4)')
    parser.add_argument("--virtual", default="1,8,64", help="in virtual time (default: 1,8,64)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each setting under MPI (default: 1)")
    options = parser.parse_args()
    for name in options.jobs:
        row = measured(name, options)
        shown = [
            (one.get("strategy", "async()"), str(one["workers"]) + ("v" if one.get("virtual", True) else ""),
             f"{one.get('samples_per_second') or 0:.4g}", json.dumps(one.get("metrics"))[:60])
            for one in row["rows"]
        ]  # fmt: skip
        print(table([("strategy", "workers", "samples/s", name), *shown]), flush=True)
        write_row("job_tables", row)


if __name__ == "__main__":
    main()
