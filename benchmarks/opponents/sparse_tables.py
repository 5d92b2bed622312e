"""How many samples a second train a large embedding whose rows live apart, with our servers, TorchRec, and torch RPC?

    mpitrain launch -n 4 benchmarks/opponents/sparse_tables.py LIBRARY [--rounds 5] [--rows 10000 1000000]
                                                                                        (`make opponents` installs it)

Two workers with one thread each train the model of `tables.py` (one table of 16 columns, 8 words a sample by Zipf's
law, a small dense tower, SGD), and take turns of as many steps with the library's own workers, which sleep in processes
of their own meanwhile:

    sync, hybrid, async     ours with two servers, ranks 0 and 1 (hybrid: the tower by an all-reduce between workers;
                            async: nobody waits), reading of data included
    torchrec                its sharded table over gloo: the rows dealt to both workers, or all of them on the first;
                            every worker holds its part itself, so there are 2 processes, not 4
    rpc                     torch.distributed.rpc: two servers, ranks 0 and 1, with half of the rows each

What is compared under one rule is `hybrid`: theirs sum the towers' gradients between workers, too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Measurement
from measuring.served_ranking import Trained
from opponents import OPPONENTS, in_turns, installed, start_library

from mpitrain.mpi.runtime import start

MEASUREMENT = Measurement(
    contestants=("TorchRec on CPU over gloo", "torch RPC with parameter servers"),
    depends=TRAINING,
    keys=("library", "rows", "batch", "hidden"),
    figures=("ours_over.*.*",),
    campaign=('make opponents ARGS="--questions sparse_tables -- --record"',),
)

LIBRARIES = OPPONENTS["sparse_tables"]
RULES = ("sync", "hybrid", "async")
NUM_PROCESSES = {"torchrec": 2, "rpc": 4}


def compare(options, runtime, rows, batch):
    """Samples a second of every way in every round, on rank 0."""
    ways = {}
    for rule in RULES:
        trained = Trained(runtime, rows, batch, options.hidden, f"{rule}(servers=2)")
        ways[rule] = lambda _, trained=trained, rule=rule: trained.run(
            options.steps * (2 if rule == "async" else 1)
        )
    told = {"rows": rows, "batch": batch, "hidden": options.hidden}
    theirs = {}
    for how in LIBRARIES[options.library].ways:
        name = f"{options.library} {how}"
        if runtime.rank == 0:
            own = {**told, "how": how, "meeting": tempfile.mktemp()}
            theirs[name] = start_library(
                "sparse_tables", options.library, own, NUM_PROCESSES[options.library]
            )
        ways[name] = partial(ask, theirs.get(name), options.steps)
    try:
        return in_turns(ways, options.rounds, ready=runtime.barrier)
    finally:
        for one in theirs.values():
            one.close()


def ask(library, num_steps, _):
    return library.ask(num_steps=num_steps) if library else 0.0


def show(options, rows, batch, speeds):
    middle = {way: statistics.median(found) for way, found in speeds.items()}
    others = [way for way in speeds if way not in RULES]
    over = {rule: {way: median_ratio(speeds[rule], speeds[way]) for way in others} for rule in RULES}
    lines = [("way", "samples/s", "hybrid over it (95 %)")]
    for way, speed in middle.items():
        ratio = "{:.2f} ({:.2f} - {:.2f})".format(*over["hybrid"][way]) if way in others else ""
        lines.append((way, f"{speed:,.0f}", ratio))
    print(f"\n{rows:,} rows of 16, batch {batch} x 8 words, {options.rounds} rounds of {options.steps} steps")
    print(table(lines), flush=True)
    row = {
        "library": options.library, "libraries": installed("sparse_tables", options.library), "rows": rows,
        "batch": batch, "hidden": options.hidden, "rounds": options.rounds, "steps": options.steps, "workers": 2,
        "samples_per_second": middle, "ours_over": over,
    }  # fmt: skip
    write_row("sparse_tables", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("library", choices=sorted(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of a turn (default: 200)")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime = start()
    assert runtime.size == 4, "start with 4 ranks"
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a process")
    for rows in options.rows:
        for batch in options.batch:
            speeds = compare(options, runtime, rows, batch)
            if runtime.rank == 0:
                show(options, rows, batch, speeds)
    runtime.finish()


if __name__ == "__main__":
    main()
