"""Does stopping early find what the whole grid finds, with how much less training, and how long do ranks stand idle?

    python benchmarks/search.py [--rounds 1] [--epochs 10] [--ranks 4]

The digits job with 32 configurations (8 learning rates x 4 batch sizes), by `mpitrain launch -n 4 sweep`, every rank a
group of its own: once as a grid, all trained to their end, and once with `--asha`. Each round has another seed. The
accuracy is that on the 359 validation samples, so one sample is 0.28 points. The idle share is that of the time from
the first task to the end of the last one, over all ranks: what is left is training, validation and saving.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring.common import make_parser, table, write_row
from measuring.measurement import LAUNCHED, Command, Measurement

MEASUREMENT = Measurement(
    contestants=("the whole grid",),
    depends=(*LAUNCHED, "mpitrain/search", "jobs/digits.py"),
    keys=("rule", "seed", "epochs", "ranks"),
    figures=("accuracy_lost", "share_of_samples"),
    commands=(
        Command("python benchmarks/search.py --rounds 3", minutes=8, covers={"rule": "asha()"}),
        Command(
            'python benchmarks/search.py --rounds 3 --asha "asha(least=1, reduction=4)"',
            minutes=20,
            covers={"rule": "asha(least=1, reduction=4)"},
        ),
    ),
)

ROOT = Path(__file__).resolve().parents[1]
RATES = "1e-4,3e-4,6e-4,1e-3,2e-3,4e-3,8e-3,1.6e-2"
BATCHES = "32,64,128,256"


def sweep(ranks: int, epochs: int, seed: int, *words: str) -> dict:
    """The figures of one sweep, with the accuracy of its best configuration."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "figures.json")
        mpitrain = [sys.executable, "-m", "mpitrain"]
        pack = [*mpitrain, "data", "pack", "digits", "data/digits"]
        subprocess.run(pack, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        command = [
            *mpitrain, "launch", f"-n{ranks}", "sweep", str(ROOT / "jobs" / "digits.py"),
            "--vary", f"lr={RATES}", "--vary", f"batch-size={BATCHES}",
            "--epochs", str(epochs), "--seed", str(seed), "--metric", "accuracy",
            "--run-dir", f"{scratch}/runs", "--json", str(out), *words,
        ]  # fmt: skip
        subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    ended = [one["value"] for one in found["configurations"]]
    (best,) = found["best"]  # one configuration a setting: nothing is repeated
    return {
        "best": found["configurations"][best]["options"],
        "accuracy": found["configurations"][best]["value"],
        "num_configurations": len(ended),
        "num_ended_by_status": {
            status: sum(one["status"] == status for one in found["configurations"])
            for status in sorted({one["status"] for one in found["configurations"]})
        },
        "num_attempts": found["num_attempts"],
        "rungs_epochs": found["rungs_epochs"],
        "num_samples": found["num_samples"],
        "idle_share": found["idle_share"],
        "elapsed_s": found["elapsed_s"],
    }


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=1, help="seeds (default: 1)")
    parser.add_argument("--epochs", type=int, default=10, help="of the whole training (default: 10)")
    parser.add_argument("--ranks", type=int, default=4, help="of the launch (default: 4)")
    parser.add_argument("--asha", default="asha()", help="the rule (default: asha())")
    options = parser.parse_args()
    lines: list[tuple[str, ...]] = [("seed", "", "best accuracy", "samples", "seconds", "idle ranks")]
    for seed in range(options.rounds):
        ways = {
            "grid": sweep(options.ranks, options.epochs, seed),
            "asha": sweep(options.ranks, options.epochs, seed, "--asha", options.asha),
        }
        for name, way in ways.items():
            lines.append(
                (str(seed), name, f"{way['accuracy']:.4f}", f"{way['num_samples']:,}", f"{way['elapsed_s']:.0f}",
                 f"{100 * way['idle_share']:.1f} %")
            )  # fmt: skip
        row = {
            "seed": seed, "ranks": options.ranks, "epochs": options.epochs, "rule": options.asha, **ways,
            "accuracy_lost": ways["grid"]["accuracy"] - ways["asha"]["accuracy"],
            "share_of_samples": ways["asha"]["num_samples"] / ways["grid"]["num_samples"],
        }  # fmt: skip
        write_row("search", row)
    print(table(lines))


if __name__ == "__main__":
    main()
