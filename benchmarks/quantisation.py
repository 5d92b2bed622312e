"""What do eight bits cost and bring? Trained jobs beside what `mpitrain export --int8` makes of them.

    python benchmarks/quantisation.py [--rounds 5] [--jobs digits charnn cnn]

No MPI. Each job is trained once (charnn with two layers of 64, so that it takes a minute), and exported in each way as
often as there are rounds; an export measures the trained model and the exported one in turn, on batches of the job's
own size, and the figure of speed is the median of the rounds' ratios. Accuracies are those of the validation set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring.common import machine, make_parser, middle_of, table, write_row
from measuring.measurement import TRAINING, Command, Measurement

import mpitrain as mt

MEASUREMENT = Measurement(
    contestants=("the model as it was trained",),
    depends=(*TRAINING, "jobs"),
    keys=("job",),
    figures=("ways.*.batch_time",),
    commands=(Command("python benchmarks/quantisation.py", minutes=12),),
)

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "digits": (["digits", "data/digits"], ["--epochs", "10"]),
    "charnn": (["topics", "data/topics"], ["--strategy", "allreduce()", "--epochs", "3"]),
    "cnn": (["jobs/cnn.py:shapes", "data/shapes"], ["--epochs", "2"]),
}
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"form": "int8"},
    "int8 dynamic": {"form": "int8", "activations": "dynamic"},
    "int8 calibrated": {"form": "int8", "activations": "calibrated"},
    "fp16": {"form": "fp16"},
}
SMALL = {"CHARNN_HIDDEN": "64", "CHARNN_LAYERS": "2", "CNN_SAMPLES": "4000"}


def mpitrain(*words: str) -> None:
    """One command at the root of the repository; its output is shown where it fails."""
    run = subprocess.run([sys.executable, "-m", "mpitrain", *words], cwd=ROOT, capture_output=True, text=True)
    if run.returncode not in (0, 3):  # a missed target is a model, too
        sys.exit(run.stdout + run.stderr)


def trained(name: str, folder: Path) -> Path:
    """The run directory of the job; its data are made if they are not there."""
    pack, options = JOBS[name]
    if not (ROOT / pack[1]).exists():
        mpitrain("data", "pack", *pack)
    run_dir = folder / name
    mpitrain("train", f"jobs/{name}.py", "--quiet", "--run-dir", str(run_dir), *options)
    return run_dir


def study(name: str, rounds: int) -> None:
    """Every way; prints the table and writes a row."""
    rows = [("way", "layers", "bytes of these", "file", "a batch", "95 %", "accuracy", "points")]
    record, left = {}, {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run_dir = trained(name, folder)
        for way, options in WAYS.items():
            done = [
                mt.export(run_dir, folder / "model.pt2", overwrite=True, **options) for _ in range(rounds)
            ]
            first = done[0]
            times = middle_of([one.batch_s[1] / one.batch_s[0] for one in done])
            accuracies = [one["accuracy"] for one in first.metrics]
            shares = [after / before for before, after in (first.layer_bytes, first.file_bytes)]
            record[way] = {
                "layers": list(first.layers), "left": sorted(first.left), "layer_bytes": first.layer_bytes,
                "file_bytes": first.file_bytes, "batch_time": times, "accuracy": accuracies,
            }  # fmt: skip
            if way == "int8":
                left = first.left
            rows.append(
                (way, str(len(first.layers)), f"{shares[0]:.3f}", f"{shares[1]:.3f}", f"{times[0]:.2f}",
                 f"{times[1]:.2f} .. {times[2]:.2f}", f"{accuracies[1]:.4f}",
                 f"{100 * (accuracies[1] - accuracies[0]):+.2f}")
            )  # fmt: skip
    print(f"\n{name}, of the trained model's\n{table(rows)}")
    print("as they were in int8: " + ", ".join(left), flush=True)
    write_row("quantisation", {"job": name, "rounds": rounds, "ways": record})


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=5, help="how often each export is made and measured")
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=list(JOBS))
    options = parser.parse_args()
    os.environ.update(SMALL | {"OMP_NUM_THREADS": "1"})
    os.chdir(ROOT)  # the jobs' data
    print(f"{machine()['cpu']}; {options.rounds} rounds", flush=True)
    for name in options.jobs:
        study(name, options.rounds)


if __name__ == "__main__":
    main()
