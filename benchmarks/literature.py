"""Does every job of `jobs/` reach its target with allreduce and with a server, and after how many samples and seconds?

    python benchmarks/literature.py [--jobs digits cnn nmt pixelcnn ranking] [--workers 2] [--rounds 1]

Data are packed as the head of a job file says, into a directory that goes afterwards; then `mpitrain bench` trains the
job, `--rounds` times with other seeds, by either strategy in turns. Samples and seconds to the target are those of the
first validation that met it, so they come in whole epochs; seconds depend on the machine's load, which the row has.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring.common import machine, make_parser, table, write_row
from measuring.measurement import LAUNCHED, Measurement

MEASUREMENT = Measurement(
    wanted="every job reaches its target",
    depends=(*LAUNCHED, "mpitrain/search", "jobs"),
    keys=("job", "strategy", "workers"),
    figures=("to_target.seconds",),
    campaign=("python benchmarks/literature.py",),
)

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("allreduce()", "async()")  # the latter has one server
MPITRAIN = [sys.executable, "-m", "mpitrain"]


def packing(name):
    """The arguments of `mpitrain` in the first command at the head of a job file, which packs its data."""
    lines = (ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return next(
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mpitrain data pack")
    )


def measured(name, options, folder):
    """A row for each strategy."""
    pack = [str(ROOT / word) if word.startswith("jobs/") else word for word in packing(name)]
    subprocess.run([*MPITRAIN, *pack], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    job, found = ROOT / "jobs" / f"{name}.py", Path(folder) / f"{name}.json"
    command = [*MPITRAIN, "bench", str(job), "--strategies", *STRATEGIES, "--workers", str(options.workers)]
    command += ["--repeats", str(options.rounds), "--json", str(found), "--quiet"]
    load = os.getloadavg()[0]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    bench = json.loads(found.read_text(encoding="utf-8"))
    return [row_of(name, bench, row) | {"load_before": load} for row in bench["rows"]]


def row_of(name, bench, row):
    ranks = row["workers"] + (row["servers"] if "servers" in row else int("async" in row["strategy"]))
    kept = ("strategy", "workers", "samples_per_second", "metrics", "num_met", "num_runs", "to_target")
    launch = f'mpitrain launch -n {ranks} train jobs/{name}.py --strategy "{row["strategy"]}"'
    return {"job": name, "launch": launch, "target": bench["target"], **{key: row[key] for key in kept}}


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--jobs", nargs="+", default=["digits", "cnn", "nmt", "pixelcnn", "ranking"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(
        f"{machine()['cpu']}, {machine()['num_cores']} cores; {options.workers} workers, {options.rounds} seed(s)"
    )
    lines, missed = [("job", "strategy", "met", "samples", "seconds", "metrics")], 0
    with tempfile.TemporaryDirectory(prefix="literature-") as folder:
        for name in options.jobs:
            for row in measured(name, options, folder):
                met = row["to_target"] or {}
                missed += row["num_runs"] - row["num_met"]
                values = (f"{key} {row['metrics'][key]['mean']:.3f}" for key in row["target"])
                lines.append(
                    (name, row["strategy"], f"{row['num_met']} of {row['num_runs']}",
                     *(f"{met[key]:.0f}" if met else "-" for key in ("samples", "seconds")), ", ".join(values))
                )  # fmt: skip
                write_row("literature", {**row, "rounds": options.rounds})
    print("\n" + table(lines))
    sys.exit(3 if missed else 0)


if __name__ == "__main__":
    main()
