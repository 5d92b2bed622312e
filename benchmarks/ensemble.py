"""Does an ensemble of the best three of several runs beat the best of them, on samples that no choice has seen?

    python benchmarks/ensemble.py [--rounds 5] [--members 5] [--epochs 3]

No MPI. For each round the digits are split anew: three fifths to train on, a fifth to choose the best three of the
members by (they differ in their seeds), and a fifth to measure on. The best three are combined by averaged
probabilities, by votes and as a greedy soup of weights. Differences are to the member that the validation samples show
as the best, in points of accuracy; the mean of the differences comes with a 95 % bootstrap interval over splits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import runpy
import statistics
import tempfile
from pathlib import Path

import torch
from measuring.common import machine, make_parser, mean_interval, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement

import mpitrain as mt

MEASUREMENT = Measurement(
    contestants=("the best single member",),
    depends=(*VIRTUAL, "jobs/digits.py"),
    keys=("members", "epochs"),
    figures=("ways.*.points",),
    commands=(Command("python benchmarks/ensemble.py", minutes=4),),
)

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "probabilities": {"combine": "probabilities"},
    "votes": {"combine": "votes"},
    "greedy soup": {"soup": "greedy"},
}


def split(folder: Path, number: int) -> dict[str, Path]:
    """Files of the three parts of the digits, dealt anew for each number."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number)).numpy()
    images = (x[order] / 16).astype("float32").reshape(-1, 1, 8, 8)
    fifth = len(x) // 5
    parts = {"validate": slice(0, fifth), "test": slice(fifth, 2 * fifth), "train": slice(2 * fifth, None)}
    for name, part in parts.items():
        mt.pack({"x": images[part], "y": y[order][part]}, folder / name)
    return {name: folder / name for name in parts}


def measure(number: int, num_members: int, epochs: int) -> dict[str, float]:
    """Accuracy on the test samples of the best member by validation, of the mean of the three, and of each way."""
    job = runpy.run_path(str(ROOT / "jobs" / "digits.py"))["job"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parts = split(folder, number)
        shards = {name: mt.Shards(str(path / "*.h5")) for name, path in parts.items()}
        job = dataclasses.replace(
            job, data=shards["train"], validate=shards["validate"], epochs=epochs, target={}
        )
        (folder / "runs").mkdir()
        for member in range(num_members):
            one = dataclasses.replace(job, seed=100 * number + member)
            run_dir = str(folder / "runs" / f"member-{member}")
            with contextlib.redirect_stdout(io.StringIO()):  # its line of figures
                mt.simulate(one, mt.AllReduce(), workers=1, quiet=True, run_dir=run_dir)
        found: dict[str, float] = {}
        for way, options in WAYS.items():
            done = mt.ensemble(
                [folder / "runs"], folder / way, top=3, by="accuracy", data=str(parts["test"] / "*.h5"), job=job,
                **options,
            )  # fmt: skip
            found[way] = done.metrics["accuracy"]
            found["best member"] = done.members[0].metrics[
                "accuracy"
            ]  # they come in the order of the validation
            found["mean of the three"] = statistics.mean(one.metrics["accuracy"] for one in done.members)
    return found


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", "--splits", dest="rounds", type=int, default=5)
    parser.add_argument("--members", type=int, default=5, help="runs of which the best three are taken")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()['cpu']}; {options.rounds} splits, the best three of {options.members} runs")
    splits = []
    for number in range(options.rounds):
        splits.append(measure(number, options.members, options.epochs))
        print(
            f"split {number}: " + ", ".join(f"{name} {value:.4f}" for name, value in splits[-1].items()),
            flush=True,
        )
    rows = [("way", "accuracy", "points from the best member", "95 %", "won", "lost", "equal")]
    record = {}
    for name in ("best member", "mean of the three", *WAYS):
        values = [one[name] for one in splits]
        points = [100 * (one[name] - one["best member"]) for one in splits]
        low, high = mean_interval(points)
        counts = [sum(sign(one) == wanted for one in points) for wanted in (1, -1, 0)]
        record[name] = {
            "accuracy": values,
            "points": [statistics.mean(points), low, high],
            "won_lost_equal": counts,
        }
        rows.append(
            (name, f"{100 * statistics.mean(values):.2f} %", f"{statistics.mean(points):+.2f}",
             f"{low:+.2f} .. {high:+.2f}", *map(str, counts))
        )  # fmt: skip
    print(f"\n{table(rows)}", flush=True)
    write_row(
        "ensemble",
        {"rounds": options.rounds, "members": options.members, "epochs": options.epochs, "ways": record},
    )


def sign(value: float) -> int:
    return (value > 1e-9) - (value < -1e-9)


if __name__ == "__main__":
    main()
