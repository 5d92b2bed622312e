"""Does it pay to split a model that one process could train? Whole runs of jobs/charnn.py, by turns.

    python benchmarks/splitting.py [--rounds 5] [--steps 24]

The global batch is 32 samples for everybody, one torch thread a rank. Ways:

    one process            the bound of what two ranks could halve
    allreduce, 2 ranks     whole models, half a batch each: what to use when the model fits
    sharded, 2 ranks       half the parameters and optimizer state each
    pipeline, 2 ranks      half the layers each, with 2, 4 and 8 microbatches

The figure is samples per second as the run itself reports it (start-up and first steps left out), as a ratio to
the one process of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import machine, median_ratio, table, write_row

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "one process": (1, 32, "allreduce"),
    "allreduce, 2 ranks": (2, 16, "allreduce"),
    "sharded, 2 ranks": (2, 16, "sharded"),
    "pipeline, 2 microbatches": (2, 32, "pipeline(microbatches=2)"),
    "pipeline, 4 microbatches": (2, 32, "pipeline(microbatches=4)"),
    "pipeline, 8 microbatches": (2, 32, "pipeline(microbatches=8)"),
}


def run(way: str, steps: int, directory: str) -> dict:
    """`result.json` of one run."""
    ranks, batch_size, strategy = WAYS[way]
    command = [
        sys.executable,
        "-m",
        "mpitrain",
        "launch",
        "-n",
        str(ranks),
        "train",
        str(ROOT / "jobs/charnn.py"),
    ]
    command += ["--synthetic", "--steps", str(steps), "--batch-size", str(batch_size), "--strategy", strategy]
    command += ["--run-dir", directory, "--quiet"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL, timeout=600)
    return json.loads((Path(directory) / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    idle: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    bubble: dict[str, float] = {}
    for _ in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as directory:
                result = run(way, options.steps, directory)
            speeds[way].append(result["samples_per_second"])
            if "pipeline" in result:
                idle[way].append(result["pipeline"]["idle_share"])
                bubble[way] = result["pipeline"]["bubble"]
    rows = [("way", "samples/s", "ratio to one process", "95 % interval", "idle share by stage", "bubble")]
    row: dict = {"rounds": options.rounds, "steps": options.steps, "ways": {}}
    for way, values in speeds.items():
        ratio, low, high = median_ratio(values, speeds["one process"])
        shares = [statistics.median(stage) for stage in zip(*idle[way])]
        told = " ".join(f"{share:.2f}" for share in shares)
        bound = f"{bubble[way]:.2f}" if way in bubble else ""
        rows.append(
            (way, f"{statistics.median(values):.0f}", f"{ratio:.2f}", f"{low:.2f} - {high:.2f}", told, bound)
        )
        row["ways"][way] = {
            "samples_per_second": statistics.median(values),
            "ratio": [ratio, low, high],
            "idle_share": shares,
            "bubble": bubble.get(way),
        }
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, load {os.getloadavg()[0]:.1f}")
    print(table(rows))
    print(f"written to {write_row('splitting', row)}")


if __name__ == "__main__":
    main()
