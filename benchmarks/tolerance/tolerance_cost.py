"""What do fault tolerance and checkpoints cost a run that nothing happens to?

    python benchmarks/tolerance/tolerance_cost.py [--parts ulfm checkpoints] [--transport "shared memory" tcp]
        [--launches 6]

ulfm          the step of `allreduce()` on two workers and of `async()` on two workers and a server, of `mpitrain launch
              --ft ulfm` over that of a plain launch. The level is a property of the launch, so one job of each kind is
              started, and the two take turns (`tolerance_job.py`): a launch gives one ratio, the median over its
              rounds, and the figure is the median over the launches with its 95 % bootstrap interval. Beside it, what
              share of a step it takes to look whether the gradient is finite.
checkpoints   the time that training loses by one checkpoint written in the background: of a window that begins with
              one, what the steps taken in it are short of, by the rate in the windows before and after. The same is
              asked where no checkpoint was, midway between two: how far from 0 that lies is what this machine can tell.
              One a minute costs that loss over 60 s.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_right
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import machine, make_parser, median_ratio, middle_of, table, write_row
from measuring.launching import search_path
from measuring.measurement import LAUNCHED, Command, Measurement

MEASUREMENT = Measurement(
    contestants=("the same job without it",),
    wanted="at most 3 % for ULFM, at most 5 % for a checkpoint a minute",
    depends=LAUNCHED,
    keys=("part", "strategy", "model", "transport"),
    figures=("ratio", "share_of_a_minute"),
    commands=(Command("python benchmarks/tolerance/tolerance_cost.py", minutes=10),),
)

HERE = Path(__file__).resolve().parent
TCP = "--mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include lo"
TRANSPORTS = {"shared memory": "", "tcp": TCP}
RANKS = {"allreduce()": 2, "async()": 3}
LEVELS = {"plain": (), "ulfm": ("--ft", "ulfm")}
TURN_STEPS = {"mlp": 12, "cnn": 3}  # more than half a second
LIMITS = {"ulfm": 0.03, "checkpoints": 0.05}
DEADLINE_S = 300
LEAST_VALUES = 6  # of fewer, the true median lies beyond all of them more than 5 times in 100


def start(folder, strategy, words, level=(), host_args=""):
    """Launch `tolerance_job.py`; its output goes to `folder/out`."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", str(RANKS[strategy]), *level]
    command += [f"--host-args={host_args}"] if host_args else []
    command += [str(HERE / "tolerance_job.py"), words[0], strategy, "--folder", str(folder), *words[1:]]
    env = {**os.environ, "PYTHONPATH": search_path(HERE), "OMP_NUM_THREADS": "1"}
    with open(folder / "out", "w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def wait_for(jobs):
    """Until all (folder, process) have ended well; none is left behind otherwise."""
    try:
        for folder, process in jobs:
            if process.wait(DEADLINE_S) != 0:
                raise SystemExit((folder / "out").read_text())
    finally:
        for _, process in jobs:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)


def chosen_pml(level, host_args):
    """Which of Open MPI's engines for messages between two ranks this launch takes, by its own account."""
    args = f"--host-args=--mca pml_base_verbose 10 {host_args}"
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "2", *level, args, "env"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    named = re.search(r"component (\w+) selected", ended.stderr + ended.stdout)
    return named[1] if named else "not told"


# ---- ulfm


def one_pair(strategy, options, host_args, number):
    """Start a job of each level and let them take turns; by model, seconds a step by level and round, and a check's."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blocks = [options.turn_steps or TURN_STEPS[model] for model in options.models]
        for model in options.models:
            (folder / model).mkdir()
        words = ["turns", "--models", *options.models, "--blocks", *map(str, blocks)]
        words += ["--rounds", str(options.rounds + 1), "--jobs", str(len(LEVELS))]
        order = list(LEVELS) if number % 2 == 0 else list(LEVELS)[::-1]
        wait_for([
            (folder / level, start(folder / level, strategy, [*words, "--mine", str(mine)], LEVELS[level], host_args))
            for mine, level in enumerate(order)
        ])  # fmt: skip
        return {
            model: read_turns(folder / model, order, options.rounds, block)
            | {"check": read_checks(folder / model)}
            for model, block in zip(options.models, blocks, strict=True)
        }


def read_turns(folder, order, rounds, block):
    """Seconds a step by level, one for each round after the first; the mean over ranks, for they overlap."""
    taken = {}
    for path in folder.glob("turn-*"):
        _, turn, _ = path.name.split("-")
        taken.setdefault(int(turn), []).append(float(path.read_text()))
    seconds = {level: [] for level in order}
    for number in range(1, rounds + 1):
        owners = order if number % 2 == 0 else order[::-1]
        for place, level in enumerate(owners):
            seconds[level].append(statistics.mean(taken[number * len(order) + place]) / block)
    return seconds


def read_checks(folder):
    """Seconds of one look whether a gradient is finite, over ranks and levels."""
    return statistics.median(float(path.read_text()) for path in folder.glob("check-*"))


def run_ulfm(options):
    lines = [("strategy", "model", "over", "plain", "ulfm", "ratio", "95 % interval", "under 3 %", "finite?")]
    for transport in options.transport:
        host_args = TRANSPORTS[transport]
        pml = {level: chosen_pml(words, host_args) for level, words in LEVELS.items()}
        for strategy in options.strategies:
            pairs = [one_pair(strategy, options, host_args, number) for number in range(options.launches)]
            for model in options.models:
                rows = [pair[model] for pair in pairs]
                medians = {
                    level: statistics.median(statistics.median(row[level]) for row in rows)
                    for level in LEVELS
                }
                ratios = [median_ratio(row["ulfm"], row["plain"])[0] for row in rows]
                middle, low, high = middle_of(ratios)
                said = verdict(low - 1, high - 1, LIMITS["ulfm"], len(ratios))
                check_s = statistics.median(row["check"] for row in rows)
                lines.append((
                    strategy, model, transport, *(f"{medians[level] * 1e3:.1f} ms" for level in LEVELS),
                    f"{middle:.3f}", f"{low:.3f} - {high:.3f}", said, f"{check_s / medians['plain']:.2%}",
                ))  # fmt: skip
                write_row("tolerance_cost", {
                    "part": "ulfm", "strategy": strategy, "model": model, "transport": transport, "pml": pml,
                    "launches": options.launches, "rounds": options.rounds,
                    "turn_steps": options.turn_steps or TURN_STEPS[model],
                    "median_ms": {level: value * 1e3 for level, value in medians.items()},
                    "ratios": ratios, "ratio": [middle, low, high], "under_limit": said,
                    "finite_check_ms": check_s * 1e3, "finite_check_share": check_s / medians["plain"],
                })  # fmt: skip
        print(f"{transport}: pml {pml}", flush=True)
    print(table(lines), flush=True)


# ---- checkpoints


def taken_by(times, now_s):
    """Steps begun by `now_s`, in fractions: between two steps as if they went evenly."""
    index = bisect_right(times, now_s)
    if index in (0, len(times)):
        raise ValueError("outside the run")
    return index - 1 + (now_s - times[index - 1]) / (times[index] - times[index - 1])


def lost_s(workers, at_s, window_s):
    """Seconds by which the window that begins at `at_s` is short of steps, by the rate in those before and after.

    `workers`: for each, when its steps began, ascending. Steps taken at an even rate lose nothing, and a pause of p
    seconds in the window, of all workers, loses p.
    """
    before, begin, end, after = (
        sum(taken_by(times, at_s + offset * window_s) for times in workers) for offset in (-1, 0, 1, 2)
    )
    per_s = (begin - before + after - end) / (2 * window_s)
    return window_s - (end - begin) / per_s


def losses(times, windows_s):
    """(seconds lost by each checkpoint, the same where there was none) of one run's notes."""
    workers = [one["steps"] for one in times if one["steps"]]
    saves = next(one["saves"] for one in times if len(one["saves"]) > 1)
    ends = min(steps[-1] for steps in workers)
    begins = max(steps[5] for steps in workers)  # the first ones warm up
    real = [at_s for at_s in saves if begins < at_s - windows_s and at_s + 2 * windows_s < ends]
    none = [at_s + 2 * windows_s for at_s in real if at_s + 4 * windows_s < ends]
    return tuple([lost_s(workers, at_s, windows_s) for at_s in one] for one in (real, none))


def run_checkpoints(options):
    lines = [
        (
            "strategy",
            "writes",
            "of",
            "one takes",
            "training loses",
            "none written",
            "one a minute",
            "under 5 %",
        )
    ]
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory(dir=options.disk) as scratch:
            folder = Path(scratch) / "job"
            words = ["writes", "--rounds", str(options.steps), "--every-s", str(4 * options.window_s)]
            wait_for([(folder, start(folder, strategy, words))])
            times = [json.loads(path.read_text()) for path in sorted(folder.glob("times-*.json"))]
            result = json.loads((folder / "run" / "result.json").read_text())
        cost = result["ranks"][0]["checkpoints"]
        real, none = losses(times, options.window_s)
        longest_s = max(b - a for one in times for a, b in zip(one["saves"], one["written"], strict=True))
        found = {
            "num_bytes": cost["num_bytes"] // cost["num_written"],
            "write_s": cost["write_s"] / cost["num_written"],
            "copy_s": cost["copy_s"] / cost["num_written"],
            "longest_write_s": longest_s,
            "lost_s": middle_of(real),
            "lost_s_where_none": middle_of(none),
        }
        middle, low, high = (value / 60 for value in found["lost_s"])
        said = verdict(low, high, LIMITS["checkpoints"], len(real))
        if longest_s > options.window_s:
            said = f"a write took {longest_s:.1f} s: give --window-s more"
        write_row("tolerance_cost", {
            "part": "checkpoints", "strategy": strategy, "model": "mlp", "window_s": options.window_s,
            "checkpoints": len(real), **found, "losses_s": real, "losses_s_where_none": none,
            "share_of_a_minute": [middle, low, high], "under_limit": said,
        })  # fmt: skip
        lines.append((
            strategy, str(len(real)), f"{found['num_bytes'] / 1e6:.0f} MB", f"{found['write_s']:.2f} s",
            *("{:.2f} ({:.2f} - {:.2f}) s".format(*found[key]) for key in ("lost_s", "lost_s_where_none")),
            f"{middle:.2%} ({low:.2%} - {high:.2%})", said,
        ))  # fmt: skip
    print(table(lines), flush=True)


def verdict(low, high, limit, num_values):
    """Whether an interval lies on one side of the limit."""
    if num_values < LEAST_VALUES:
        return "too few to say"
    return "yes" if high < limit else "no" if low > limit else "not resolvable here"


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument(
        "--parts", nargs="+", choices=["ulfm", "checkpoints"], default=["ulfm", "checkpoints"]
    )
    parser.add_argument("--strategies", nargs="+", choices=sorted(RANKS), default=sorted(RANKS))
    parser.add_argument("--models", nargs="+", choices=sorted(TURN_STEPS), default=["mlp", "cnn"])
    parser.add_argument("--transport", nargs="+", choices=sorted(TRANSPORTS), default=["shared memory"])
    parser.add_argument("--launches", type=int, default=6, help="pairs of jobs for each strategy")
    parser.add_argument(
        "--rounds", type=int, default=6, help="turns of each job, besides a first that warms up"
    )
    parser.add_argument("--turn-steps", type=int, default=None, help="steps of a turn (default: about 0.6 s)")
    parser.add_argument("--steps", type=int, default=1200, help="of each worker of a run with checkpoints")
    parser.add_argument("--window-s", type=float, default=1.5, help="longer than a checkpoint takes to write")
    parser.add_argument(
        "--disk", default=None, help="where checkpoints are written (default: the temporary folder)"
    )
    options = parser.parse_args()
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank", flush=True)
    if "ulfm" in options.parts:
        run_ulfm(options)
    if "checkpoints" in options.parts:
        run_checkpoints(options)


if __name__ == "__main__":
    main()
