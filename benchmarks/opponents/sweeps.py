"""How long do the workers of a sweep stand idle, and how many samples does it take to the same score, beside libraries?

    python benchmarks/opponents/sweeps.py LIBRARY [--rounds 5] [--trials 16] [--epochs 9] [--score 0.97]
                                                                                        (`make opponents` installs it)

The digits job on two workers with one thread each, configurations drawn by our sampler (a learning rate from 1e-4 to
1.6e-2 by a log-uniform law, a batch of 32, 64 or 128), the same ones for all:

    random      all are trained to their end
    halving     asynchronous successive halving: epochs 1, 3 and 9, a third goes on
    tpe and halving     Optuna alone: it draws by itself with TPE, and prunes by successive halving

Ours is `mpitrain launch -n 2 sweep`; a library trains the same model in a loop of plain torch (`digits_trial.py`),
which has no checkpoints: what goes on there has never stopped, where ours goes on from a checkpoint. Each round has
another seed, and ours and the library take turns in it. Idle is the share of the time from the first trial's beginning
to the last one's end in which a worker had no trial. A worker that waits for processor time is not idle. Samples to the
score are those of all trials until one has reported the wanted validation accuracy; `-`: none has.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "libraries"))
import digits_trial
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import LAUNCHED, ROOT, Measurement
from opponents import OPPONENTS, in_turns, installed, start_library

from mpitrain.search.sweep.axes import read_axis

MEASUREMENT = Measurement(
    contestants=("Optuna with two processes", "Ray Tune"),
    depends=(*LAUNCHED, "mpitrain/search", "jobs/digits.py"),
    keys=("library", "trials", "epochs", "score"),
    figures=("elapsed_ratio.*", "median.*.*"),
    campaign=('make opponents ARGS="--questions sweeps -- --record"',),
)

LIBRARIES = OPPONENTS["sweeps"]
RATES, BATCHES, REDUCTION, WORKERS = (1e-4, 1.6e-2), (32, 64, 128), 3, 2
AXES = (f"lr=log_uniform({RATES[0]}, {RATES[1]})", f"batch-size={','.join(map(str, BATCHES))}")


def drawn(seed, num):
    """Learning rate and batch of each configuration, as `--sampler random` draws them."""
    lr, batch = map(read_axis, AXES)
    return [(float(lr.draw(seed, one)), int(batch.draw(seed, one))) for one in range(num)]


def ours(rule, options, scratch, seed):
    """A sweep of ours, as `digits_trial.account` tells of one."""
    folder, out = scratch / f"{rule}-{seed}", scratch / f"{rule}-{seed}.json"
    command = [
        sys.executable, "-m", "mpitrain", "launch", f"-n{WORKERS}", "sweep", "jobs/digits.py", "--sampler", "random",
        "--num", str(options.trials), "--sampler-seed", str(seed), *(f"--vary={axis}" for axis in AXES),
        "--epochs", str(options.epochs), "--seed", str(seed), "--metric", "accuracy", "--run-dir", str(folder),
        "--json", str(out), *(["--asha", f"asha(least=1, reduction={REDUCTION})"] if rule == "halving" else []),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    return {
        "reports": reports_of(folder),
        "elapsed_s": found["elapsed_s"],
        "idle_share": found["idle_share"],
    }


def reports_of(folder):
    """Samples since the report before, and the accuracy, of all runs in the order in which they came."""
    found = []
    for path in folder.glob("*/metrics.jsonl"):
        before = 0
        for event in map(json.loads, path.read_text().splitlines()):
            if "accuracy" in event and event["samples"] > before:
                found.append(((event["time"], event["t"]), event["samples"] - before, event["accuracy"]))
                before = event["samples"]
    return [[samples, accuracy] for _, samples, accuracy in sorted(found)]


def compare(options, scratch):
    """What every way says of its sweeps."""
    told = {
        "arrays": str(write_arrays(scratch)), "epochs": options.epochs, "rates": RATES, "batches": BATCHES,
        "reduction": REDUCTION, "workers": WORKERS,
    }  # fmt: skip
    ways = {f"mpitrain {rule}": partial(ours, rule, options, scratch) for rule in ("random", "halving")}
    started = {}
    for how in LIBRARIES[options.library].ways:
        name = f"{options.library} {how}"
        folder = scratch / name.replace(" ", "-")
        folder.mkdir()
        num = WORKERS if options.library == "optuna" else 1
        own = {**told, "how": how, "folder": str(folder)}
        started[name] = start_library("sweeps", options.library, own, num)
        ways[name] = partial(ask, started[name], options.trials)
    try:
        return in_turns(ways, options.rounds, first=1)
    finally:
        for one in started.values():
            one.close()


def ask(library, trials, seed):
    return library.ask(seed=seed, drawn=drawn(seed, trials))


def write_arrays(scratch):
    """The job's data for a loop of one's own, once it is clear that the loop has the job's model."""
    import h5py

    sys.path.insert(0, str(ROOT / "jobs"))
    import digits

    assert str(digits.model()) == str(digits_trial.model()), "the trial's model is the job's"
    arrays = {}
    for kind, prefix in (("train", ""), ("validate", "held_")):
        paths = sorted((ROOT / "data" / "digits").glob(f"{kind}-*.h5"))
        assert paths, "pack the digits first: mpitrain data pack digits data/digits"
        for name in ("x", "y"):
            arrays[prefix + name] = np.concatenate([h5py.File(path)[name][:] for path in paths])
    np.savez(scratch / "digits.npz", **arrays)
    return scratch / "digits.npz"


def figures(said, score):
    """Of one sweep: what its row and table say."""
    samples, reached = 0, None
    for num, accuracy in said["reports"]:
        samples += num
        if reached is None and accuracy >= score:
            reached = samples
    return {
        "idle_share": said["idle_share"], "elapsed_s": said["elapsed_s"], "samples": samples,
        "samples_to_score": reached, "best": max(accuracy for _, accuracy in said["reports"]),
    }  # fmt: skip


def show(options, said):
    ways = {way: [figures(one, options.score) for one in found] for way, found in said.items()}
    median = {
        way: {name: middle([one[name] for one in found]) for name in found[0]} for way, found in ways.items()
    }
    ratio = {
        rule: median_ratio(*(
            [one["elapsed_s"] for one in ways[f"{who} {rule}"]] for who in ("mpitrain", options.library)
        ))
        for rule in ("random", "halving")
    }  # fmt: skip
    lines = [
        ("way", "idle", "seconds", "samples", f"to {options.score:g}", "best", "ours / theirs, s (95 %)")
    ]
    for way, one in median.items():
        rule = way.partition(" ")[2]
        over = (
            ""
            if way.startswith("mpitrain") or rule not in ratio
            else "{:.2f} ({:.2f} - {:.2f})".format(*ratio[rule])
        )
        reached = "-" if one["samples_to_score"] is None else f"{one['samples_to_score']:,.0f}"
        lines.append((way, f"{100 * one['idle_share']:.1f} %", f"{one['elapsed_s']:.1f}", f"{one['samples']:,.0f}",
                      reached, f"{one['best']:.4f}", over))  # fmt: skip
    print(
        f"{machine()['cpu']}, {machine()['num_cores']} cores, {options.trials} trials, medians of {options.rounds}"
    )
    print(table(lines), flush=True)
    row = {
        "library": options.library, "libraries": installed("sweeps", options.library), "trials": options.trials,
        "epochs": options.epochs, "score": options.score, "rounds": options.rounds, "workers": WORKERS, "ways": ways,
        "median": median, "elapsed_ratio": ratio,
    }  # fmt: skip
    write_row("sweeps", row)


def middle(values):
    """The median, in which what was never reached lies above all; None where that is the median itself."""
    found = statistics.median_high([float("inf") if value is None else value for value in values])
    return None if found == float("inf") else found


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("library", choices=sorted(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=5, help="seeds (default: 5)")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--score", type=float, default=0.97, help="validation accuracy (default: 0.97)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        show(options, compare(options, Path(scratch)))


if __name__ == "__main__":
    main()
