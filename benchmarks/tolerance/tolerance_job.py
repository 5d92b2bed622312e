"""The runs that `tolerance_cost.py` measures: jobs of `mpitrain launch`, through `mt.train` as users start them.

    turns     several jobs are alive at once and one of them trains at a time, a block of steps each; nobody but the one
              whose turn it is uses a core. Every rank writes into `FOLDER/turn-T-RANK` how long its block took.
    writes    one job trains and writes checkpoints every so many seconds; every rank notes when each step began, and
              when its part of a checkpoint was begun and was on disk, into `FOLDER/times-RANK.json`.

A step is what `mpitrain train` does for one batch: here the batch is fixed, one of `step_time.py`'s models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from measuring.models import BATCH, MODELS
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint import CheckpointWriter
from mpitrain.model.wire.flat import all_finite
from mpitrain.mpi.runtime import start
from mpitrain.values import parse

runtime = start()

MANY = 10**6  # samples: a run ends by its steps


@dataclasses.dataclass
class Turns:
    """Who trains when: job `mine` of `num_jobs`, each of which has one turn a round, in an order that alternates.

    A rank begins its turn when every rank of the one before has ended its own, and leaves the run when the last turn
    of all has ended, so that no start and no end falls into somebody's turn.
    """

    folder: Path
    mine: int
    num_jobs: int
    num_rounds: int
    block: int
    ranks: tuple[int, ...]  # of this job and every other, that take steps
    steps: int = 0

    def __post_init__(self):
        forth = list(range(self.num_jobs))
        owners = [job for number in range(self.num_rounds) for job in (forth[::-1] if number % 2 else forth)]
        self.last = len(owners) - 1
        self.turns = [turn for turn, owner in enumerate(owners) if owner == self.mine]

    def step(self, module):
        """Called as each step begins; returns when this rank may take it."""
        if self.steps == 1:  # within the first block, which warms up
            (self.folder / f"check-{self.mine}-{runtime.rank}").write_text(repr(check_s(module)))
        number, into = divmod(self.steps, self.block)
        self.steps += 1
        if into or number > len(self.turns):
            return
        if number:
            seconds = time.perf_counter() - self.began_s
            self._path(self.turns[number - 1], runtime.rank).write_text(repr(seconds))
        self._wait_for(self.turns[number] - 1 if number < len(self.turns) else self.last)
        self.began_s = time.perf_counter()

    def _wait_for(self, turn):
        while turn >= 0 and not all(self._path(turn, rank).exists() for rank in self.ranks):
            time.sleep(0.002)

    def _path(self, turn, rank):
        return self.folder / f"turn-{turn}-{rank}"


def check_s(module):
    """Seconds that one look takes whether numbers as many as the module's gradients are finite."""
    numbers, seconds = [parameter.detach() for parameter in module.parameters()], []
    for _ in range(15):
        began_s = time.perf_counter()
        all_finite(numbers)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def train(options, model, strategy, num_steps, before_step, **changes):
    """One run of `num_steps` steps of each worker; `before_step(module)` is called as each begins."""
    make, shape = MODELS[model]
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))

    def loss(module, batch):
        before_step(module)
        return nn.functional.cross_entropy(module(x), y)

    job = mt.Job(
        model=make,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data=mt.Synthetic(MANY, x=((1,), "float32")),
        batch_size=BATCH,
        **{"checkpoint_every": "never"} | changes,
    )
    run_dir = str(options.folder / "run")
    mt.train(job, parse(strategy, "strategy"), run_dir=run_dir, steps=num_steps, quiet=True)


def take_turns(options, strategy):
    servers = parse(strategy, "strategy").num_servers()
    for model in options.models:
        folder = options.folder.parent / model
        block = options.blocks[options.models.index(model)]
        turns = Turns(
            folder, options.mine, options.jobs, options.rounds, block, tuple(range(servers, runtime.size))
        )
        # one more begins as the last block ends; where workers take what there is, a few more than they need
        train(options, model, strategy, options.rounds * block + (3 if servers else 1), turns.step)


def note_writes(options, strategy):
    times = {"steps": [], "saves": [], "written": []}
    save, write = CheckpointWriter.save, CheckpointWriter._write

    def noted_save(self, *args):
        times["saves"].append(time.monotonic())
        save(self, *args)

    def noted_write(self, *args):
        write(self, *args)
        times["written"].append(time.monotonic())

    CheckpointWriter.save, CheckpointWriter._write = noted_save, noted_write
    train(
        options,
        options.models[0],
        strategy,
        options.rounds,
        lambda module: times["steps"].append(time.monotonic()),
        checkpoint_every=f"{options.every_s:g}s",
    )
    (options.folder / f"times-{runtime.rank}.json").write_text(json.dumps(times))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["turns", "writes"])
    parser.add_argument("strategy")
    parser.add_argument("--folder", type=Path, required=True, help="this job's; turns are told beside it")
    parser.add_argument("--models", nargs="+", default=["mlp"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[10], help="steps of a turn, for each model")
    parser.add_argument("--rounds", type=int, required=True, help="turns of each job; of `writes`, steps")
    parser.add_argument("--mine", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=8.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"turns": take_turns, "writes": note_writes}[options.what](options, options.strategy)
    runtime.finish()


if __name__ == "__main__":
    main()
