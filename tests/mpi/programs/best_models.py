"""Runs that keep their best model, end early and go on: `best_models.py DIRECTORY JSON`, JSON of the strategies.

The metric grows while the loss falls, and less of it is to be better: so the first validation is the best.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

runtime = start()
root = Path(sys.argv[1])
TIMED = ("allreduce()", "localsgd(period=2)", "sharded()", "sync()")
DATA = toy.Memory(52, window_samples=4)


def worsening(model, batch):
    return {"distance": -toy.square_loss(model, batch)}


def slow_loss(model, batch):
    time.sleep(0.03)
    return toy.square_loss(model, batch)


def train(strategy: str, folder: str, **options: Any) -> dict[str, Any]:
    job = mt.Job(
        model=toy.three_layers, loss=slow_loss if folder in ("timed", "later") else toy.square_loss,
        data=DATA, validate=DATA, metrics=worsening, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), epochs=6,
        batch_size=4, keep_best="<distance", checkpoint_every="26", tensor_plan={"0": "column", "2": "row"},
    )  # fmt: skip
    result = mt.train(
        job, parse(strategy, "strategy"), run_dir=str(root / strategy / folder), quiet=True, **options
    )
    rows = [
        json.loads(line) for line in (root / strategy / folder / "metrics.jsonl").read_text().splitlines()
    ]
    validations = [row for row in rows if row["event"] == "validation"]
    return {"result": result, "validations": validations, "checkpoints": [row["samples"] for row in rows if row[
        "event"] == "checkpoint"]}  # fmt: skip


found: dict[str, Any] = {}
for strategy in json.loads(sys.argv[2]):
    found[strategy] = {
        "whole": train(strategy, "whole"),
        "ended": train(strategy, "ended", patience=2),
        "still": train(strategy, "ended", patience=2, resume="auto"),
        "on": train(strategy, "ended", patience=9, resume="auto"),
    }
    if strategy in TIMED:
        found[strategy]["timed"] = train(strategy, "timed", validate_every="0.3s", epochs=8)
        found[strategy]["later"] = train(strategy, "later", validate_every="600s", epochs=8)
if runtime.rank == 0:
    (root / "found.json").write_text(json.dumps(found, default=str))
