"""How long does a step of `async()` take two replicas that are threads of one process, over two workers under MPI?

    python benchmarks/threads/threads.py [--models mlp cnn] [--rounds 6] [--steps 120]

Whole runs of `mpitrain train`, which take turns, so that drift of the machine hits all alike; a run's figure is its own
samples per second after the warm-up. Every replica computes with one thread, and each run has one server.

threads / MPI     seconds of a step with `--threads 2` over those with `mpitrain launch -n 3`
the lock          seconds of a step with `--threads 2` over those of two processes that run `--threads 1` at the same
                  time: they do the same work on the same cores, each with an interpreter and a server of its own. What
                  exceeds 1 is what sharing one interpreter's lock (and one server) costs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.launching import search_path
from measuring.measurement import LAUNCHED, Command, Measurement
from measuring.models import MODELS

MEASUREMENT = Measurement(
    contestants=("two workers under MPI", "two processes"),
    depends=LAUNCHED,
    keys=("model",),
    figures=("over_mpi", "lock"),
    commands=(Command("python benchmarks/threads/threads.py", minutes=6),),
)

HERE = Path(__file__).resolve().parent
DEADLINE_S = 600
MPI = [sys.executable, "-m", "mpitrain", "launch", "-n", "3", "train"]
ALONE = [sys.executable, "-m", "mpitrain", "train"]


def start(command, folder, model, words):
    """One run, whose output goes to `folder/out`."""
    folder.mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1", "THREADS_MODEL": model}
    line = [*command, str(HERE / "threads_job.py"), *words, "--strategy", "async()"]
    with open(folder / "out", "w") as out:
        return subprocess.Popen(
            [*line, "--run-dir", str(folder / "run"), "--quiet"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
        )


def step_s(folder, process):
    """Seconds that each of its workers took for a batch, when it has ended."""
    if process.wait(DEADLINE_S):
        raise SystemExit((folder / "out").read_text())
    result = json.loads((folder / "run" / "result.json").read_text())
    return result["batch_size"] * result["workers"] / result["samples_per_second"]


def one_round(folder, model, steps, number):
    """Seconds of a step, by way; the ways take turns in who comes first."""
    ways = {
        "MPI": [(MPI, ["--steps", str(steps)])],
        "threads": [(ALONE, ["--threads", "2", "--steps", str(steps)])],
        "two processes": [(ALONE, ["--threads", "1", "--steps", str(steps)])] * 2,
    }
    found = {}
    for way in [*ways][:: -1 if number % 2 else 1]:
        places = [folder / f"{number}-{way.replace(' ', '-')}-{place}" for place in range(len(ways[way]))]
        running = [start(command, place, model, words) for place, (command, words) in zip(places, ways[way])]
        found[way] = statistics.mean(map(step_s, places, running))
    return found


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["mlp", "cnn"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=120, help="of each worker")
    options = parser.parse_args()
    has_lock = not sysconfig.get_config_var("Py_GIL_DISABLED")
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a replica", flush=True)
    lines = [("model", "MPI", "threads", "two processes", "threads / MPI", "the lock")]
    for model in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            rounds = [
                one_round(Path(scratch), model, options.steps, number) for number in range(options.rounds)
            ]
        taken = {way: [one[way] for one in rounds] for way in rounds[0]}
        over_mpi = median_ratio(taken["threads"], taken["MPI"])
        lock = median_ratio(taken["threads"], taken["two processes"])
        medians = {way: 1e3 * statistics.median(values) for way, values in taken.items()}
        write_row("threads", {
            "model": model, "rounds": options.rounds, "steps": options.steps, "interpreter_lock": has_lock,
            "load": os.getloadavg()[0], "median_ms": medians, "step_s": taken, "over_mpi": over_mpi, "lock": lock,
        })  # fmt: skip
        spread = ["{:.2f} ({:.2f} - {:.2f})".format(*ratio) for ratio in (over_mpi, lock)]
        lines.append(
            (model, *(f"{medians[way]:.1f} ms" for way in ("MPI", "threads", "two processes")), *spread)
        )
    print(table(lines), flush=True)


if __name__ == "__main__":
    main()
