"""What does training over another MPI take, beside Open MPI, with as many ranks as cores and with twice as many?

    python benchmarks/other_mpi/other_mpi.py [--other .venv-mpich] [--rounds 7] [--ranks 2 4]

Both environments run the same ranks (`other_mpi_rank.py`) in turn, one launch of each in a round, the first one
changing: an MPI cannot be changed in a process. Measured in each launch:

    allreduce()     samples a second of the digits' network on synthetic images
    64 KB pushes    samples a second of `async()`: workers push gradients of 64 KB to one server; from four ranks on
    allgather       one all_gather of 64 B over the process group, microseconds
    barrier         one barrier, microseconds

A ratio above 1 is in favour of the other MPI: its rate over Open MPI's, or Open MPI's time over its. What a rank's
environment lacks the package sets as in any run; `--other-set MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=auto` tries
another value. A row says whether Linux shares cores among sessions (`kernel.sched_autogroup_enabled=1`, and no cgroup
of the launch), of which MPICH's launcher makes one a rank. Under a load of others' processes medians of calls hide how
long a rank was without a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.launching import search_path
from measuring.measurement import TRAINING, Command, Measurement

MEASUREMENT = Measurement(
    contestants=("the same ranks over Open MPI",),
    depends=TRAINING,
    keys=("other", "ranks", "grouped_by_session"),
    figures=("ratio.*",),
    commands=(Command("python benchmarks/other_mpi/other_mpi.py", minutes=12),),
)

HERE = Path(__file__).resolve().parent
DEADLINE_S = 300
RATES = ("allreduce()", "64 KB pushes")  # the others are times


def launch(prefix, ranks, seconds, more):
    """What rank 0 of one launch prints, by question, and which MPI it was."""
    command = [str(prefix / "bin" / "python"), "-m", "mpitrain", "launch", "-n", str(ranks)]
    command += [str(HERE / "other_mpi_rank.py"), "--seconds", str(seconds)]
    env = {**os.environ, "PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1", **more}
    ended = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S
    )
    line = next((line for line in ended.stdout.splitlines() if line.startswith('{"mpi"')), None)
    if ended.returncode or line is None:
        raise SystemExit(f"$ {' '.join(command)}\n{ended.stdout}\nexit code {ended.returncode}")
    return json.loads(line)


def grouped_by_session():
    """Whether Linux shares cores among sessions here, of which MPICH's launcher makes one a rank."""
    enabled = Path("/proc/sys/kernel/sched_autogroup_enabled")
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    mine = [
        line.split(":")[2]
        for line in groups
        if line.startswith("0::") or "cpu" in line.split(":")[1].split(",")
    ]
    return enabled.exists() and enabled.read_text().strip() == "1" and set(mine) == {"/"}


def compare(own, other, ranks, options):
    """The two contestants' figures, one a round, by question; and what they are."""
    figures, names = {"own": {}, "other": {}}, {}
    settings = dict(pair.split("=", 1) for pair in options.other_set)
    for number in range(options.rounds):
        turns = [("own", own, {}), ("other", other, settings)]
        for who, prefix, more in turns if number % 2 == 0 else turns[::-1]:
            told = launch(prefix, ranks, options.seconds, more)
            names[who] = told.pop("mpi")
            for question, value in told.items():
                figures[who].setdefault(question, []).append(value)
    return figures, names


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--other", default=".venv-mpich", help="the environment of the other MPI")
    parser.add_argument("--other-set", nargs="*", default=[], metavar="NAME=VALUE", help="in its environment")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each question of a launch")
    options = parser.parse_args()
    lines = [("ranks", "question", "own", "other", "other's speed / own (95 %)")]
    for ranks in options.ranks:
        figures, names = compare(Path(sys.prefix), Path(options.other).absolute(), ranks, options)
        ratios = {}
        for question in figures["own"]:
            pair = figures["other"][question], figures["own"][question]
            ratios[question] = median_ratio(*(pair if question in RATES else pair[::-1]))
            middle, low, high = ratios[question]
            medians = [sorted(figures[who][question])[options.rounds // 2] for who in ("own", "other")]
            unit = "samples/s" if question in RATES else "us"
            lines.append((
                str(ranks), question, *(f"{value:.1f} {unit}" for value in medians),
                f"{middle:.2f} ({low:.2f} - {high:.2f})",
            ))  # fmt: skip
        write_row("other_mpi", {
            "ranks": ranks, "rounds": options.rounds, "seconds": options.seconds, "own": names["own"],
            "mpi": names["own"], "other": names["other"], "other_set": options.other_set, "figures": figures,
            "ratio": ratios, "load": os.getloadavg()[0], "grouped_by_session": grouped_by_session(),
        })  # fmt: skip
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores; {names['own']} and {names['other']}")
    print(table(lines), flush=True)


if __name__ == "__main__":
    main()
