"""What does averaging every H steps take with the libraries that offer it, beside ours, and do the weights agree?

    mpitrain launch -n 2 benchmarks/opponents/low_communication.py LIBRARY [--model mlp] [--period 16] [--rounds 12]
                                                                                        (`make opponents` installs each)

Two workers with one thread each train the same model from the same beginning, each on batches of its own, SGD. A turn
is one period, and its last step averages; ours (`localsgd(H)` and `localsgd(H, outer=diloco())`) and the library's own
rules take turns in the same run, its workers in processes of their own that sleep meanwhile. Averaging is what the last
step of a period takes more than the median of its others, waiting for the other worker included. At the end all have
taken the same steps: the difference of weights is |theirs - ours| over |ours|, Euclidean, of one rule.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "libraries"))
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Measurement
from measuring.models import MODELS
from opponents import OPPONENTS, in_turns, installed, start_library
from rounds import OUTER, Worker

import mpitrain as mt
from mpitrain.mpi.process_group.process_group import init_default_group
from mpitrain.mpi.runtime import start
from mpitrain.training.local_sgd.averager import Averager

MEASUREMENT = Measurement(
    contestants=("torchft's LocalSGD and DiLoCo", "hivemind's averaging of parameters"),
    depends=TRAINING,
    keys=("library", "model", "period"),
    figures=("step_ratio.*", "averaging_ratio.*", "weights_apart.*"),
    campaign=(
        'make opponents ARGS="--questions low_communication -- --record"',
        'make opponents ARGS="--questions low_communication -- --model cnn --record"',
    ),
)

LIBRARIES = OPPONENTS["low_communication"]


class Ours:
    """This rank's worker under one of our rules."""

    def __init__(self, rule, options, rank):
        self.worker, self.period = Worker(options.model, rank), options.period
        outer = mt.DiLoCo(OUTER["lr"], OUTER["momentum"]) if rule == "diloco" else mt.Average()
        strategy = mt.LocalSGD(self.period, outer=outer)
        self.averager = Averager(self.worker.module, self.worker.optimizer, strategy)
        self.averager.begin_step()

    def turn(self, _):
        return self.worker.turn(self.period, self.after)

    def after(self):
        if self.averager.end_step():
            self.averager.average()
        self.averager.begin_step()


def compare(options, runtime, folder):
    """What each way answered in every round, and how far weights are apart, on rank 0."""
    rules = LIBRARIES[options.library].ways
    ours = {rule: Ours(rule, options, runtime.rank) for rule in rules}
    told = {"model": options.model, "period": options.period}
    theirs = {
        rule: start_library("low_communication", options.library, {**told, "how": rule}, runtime.size)
        for rule in (() if runtime.rank else rules)
    }
    ways = {f"mpitrain {rule}": one.turn for rule, one in ours.items()}
    for rule in rules:
        ways[f"{options.library} {rule}"] = lambda _, rule=rule: (
            theirs[rule].ask(period=options.period) if theirs else None
        )
    try:
        said = in_turns(ways, options.rounds, ready=runtime.barrier)
        apart = {rule: difference(ours[rule].worker, theirs[rule], folder) for rule in theirs}
    finally:
        for one in theirs.values():
            one.close()
    return said, apart


def difference(worker, library, folder):
    """|theirs - ours| / |ours| over all parameters."""
    paths = [str(folder / f"{who}.npy") for who in ("ours", "theirs")]
    worker.save(paths[0])
    library.ask(path=paths[1])
    mine, others = map(np.load, paths)
    return float(np.linalg.norm(others - mine) / np.linalg.norm(mine))


def show(options, said, apart):
    seconds = {
        figure: {way: [one[figure] for one in values] for way, values in said.items()}
        for figure in ("step_s", "averaging_s")
    }
    middle = {
        figure: {way: 1e3 * statistics.median(one) for way, one in found.items()}
        for figure, found in seconds.items()
    }
    lines = [("rule", "", "step, ms", "averaging, ms", "ours / theirs (95 %)", "weights apart")]
    over = {"step_s": {}, "averaging_s": {}}
    for rule in LIBRARIES[options.library].ways:
        ways = [f"{who} {rule}" for who in ("mpitrain", options.library)]
        for figure, found in over.items():
            found[rule] = median_ratio(*(seconds[figure][way] for way in ways))
        ratio, low, high = over["step_s"][rule]
        for way, cells in zip(
            ways, (("", ""), (f"{ratio:.2f} ({low:.2f} - {high:.2f})", f"{apart[rule]:.1e}")), strict=True
        ):
            lines.append((rule, way.split()[0], *(f"{middle[figure][way]:.1f}" for figure in middle), *cells))
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, {options.model}, period {options.period}")
    print(table(lines), flush=True)
    row = {
        "library": options.library, "libraries": installed("low_communication", options.library),
        "model": options.model, "period": options.period, "rounds": options.rounds, "workers": 2,
        "step_ms": middle["step_s"], "averaging_ms": middle["averaging_s"], "step_ratio": over["step_s"],
        "averaging_ratio": over["averaging_s"], "weights_apart": apart,
    }  # fmt: skip
    write_row("low_communication", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("library", choices=sorted(LIBRARIES))
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    runtime = start()
    assert runtime.size == 2, "start with 2 ranks"
    init_default_group(runtime)
    with tempfile.TemporaryDirectory() as folder:
        said, apart = compare(options, runtime, Path(folder))
    if runtime.rank == 0:
        show(options, said, apart)
    runtime.finish()


if __name__ == "__main__":
    main()
