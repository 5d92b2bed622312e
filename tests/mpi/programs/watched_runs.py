"""Runs with callbacks and logs under every strategy, and one that goes on from a checkpoint.

Arguments: a folder, and JSON of the strategies. Rank 0 writes `found.json`: by run the rows that callbacks heard, and
how many calls came on other ranks.
"""

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.training.job_file import load_job
from mpitrain.values import parse

runtime = start()
root = Path(sys.argv[1])
logs = ["csv"] + ["tensorboard"] * (importlib.util.find_spec("tensorboard") is not None)
found: dict[str, Any] = {}


class Heard:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_step(self, row):
        self.rows.append(["on_step", row])

    def on_validation(self, row):
        self.rows.append(["on_validation", row])

    def on_checkpoint(self, row):
        self.rows.append(["on_checkpoint", row])


def train(name, folder, strategy, **options):
    heard = Heard()
    job = dataclasses.replace(
        load_job(str(root / "job.py")), callbacks=[heard], log=logs, strategy=parse(strategy, "strategy")
    )
    mt.train(job, run_dir=str(root / folder), quiet=True, log_every=1, checkpoint_every="24", **options)
    others = sum(runtime.allgather(len(heard.rows) if runtime.rank else 0))
    found[name] = {"heard": heard.rows, "others": others}


for number, strategy in enumerate(json.loads(sys.argv[2])):
    train(strategy, f"run-{number}", strategy)
train("first", "goes-on", "allreduce()", epochs=1)
if runtime.rank == 0:  # as if the run had died after its first checkpoint
    for folder in sorted((root / "goes-on" / "checkpoints").glob("0*"))[1:]:
        shutil.rmtree(folder)
runtime.barrier()
train("second", "goes-on", "allreduce()", resume="auto")
if runtime.rank == 0:
    (root / "found.json").write_text(json.dumps(found))
runtime.finish()
