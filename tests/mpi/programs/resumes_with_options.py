"""Runs, and resumes of each with other options.

Arguments: a folder, and JSON of name -> (strategy, changed fields of the job and options as source text, from which
checkpoint, strategy and changes before).
"""

import contextlib
import hashlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint.parts import candidates
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from mpitrain.training.parameter_server import builder
from mpitrain.training.resuming import resume
from mpitrain.training.synchronous import ddp
from mpitrain.training.watchdog import watchdog
from tests import toy

runtime = start()
root = Path(sys.argv[1])
seen: dict[str, Any] = {}
SAMPLES = 52


def spy(owner, name, key):
    made = getattr(owner, name)

    def spied(*arguments, **named):
        seen[key] = named.get(key, arguments[-1])
        return made(*arguments, **named)

    setattr(owner, name, spied)


spy(watchdog, "Watchdog", "watchdog_s")
spy(builder, "FaultTolerantServer", "floor_s")
spy(ddp, "data_parallel", "find_unused")
spy(resume, "PartPlan", "pauses")


def model(width=6):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))


def by_turns_twice(*arguments):
    toy.by_turns(*arguments)
    return toy.by_turns(*arguments)


def normed():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.table((x * 8 + 8).long()).mean(1))


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **({"lr": 0.05, "momentum": 0.9} | options))


def groups(parameters, first=0.05, second=0.02):
    head, *rest = parameters
    return torch.optim.Adam([{"params": [head], "lr": first}, {"params": rest, "lr": second}])


def absolute(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().mean()


def poisoned(model, batch):
    bad = toy.MemoryReader(toy.Memory(52)).x[30].to(batch["x"].device)
    return toy.square_loss(model, batch) * (float("nan") if (batch["x"] == bad).all(1).any() else 1.0)


class Heard:
    steps: list[int] = []

    def on_step(self, row):
        self.steps.append(row["step"])


BASE: dict[str, Any] = {
    "model": model,
    "loss": toy.square_loss,
    "optimizer": sgd,
    "data": toy.Memory(SAMPLES, window_samples=4),
    "epochs": 2,
    "batch_size": 4,
    "checkpoint_every": "26",
    "keep_checkpoints": 99,
    "tensor_plan": {"0": "column", "2": "row"},
    "synthetic": mt.Synthetic(SAMPLES, x=((5,), "float32"), y=((1,), "float32")),
}


def train(name, strategy, changes, options):
    seen.clear()
    Heard.steps.clear()
    told: dict[str, Any] = {"code": None}
    out = io.StringIO()
    path = root / name
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            job = mt.Job(**(BASE | changes))
            given = {"run_dir": str(path), "quiet": True, "strategy": strategy} | options
            result = mt.train(job, **given)
        path = Path(result["run_dir"])
        told = {"code": result["exit_code"], "result": result, "out": out.getvalue()}
        if runtime.rank == 0:
            told["model"] = hashlib.sha256((path / "model.safetensors").read_bytes()[-200:]).hexdigest()
            told |= {"files": [one.name for one in path.iterdir()], "heard": list(Heard.steps)}
            told["checkpoints"] = len(list((path / "checkpoints").glob("*/shard-0.json")))
            told["events"] = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except AgreedError as error:
        told = {"code": error.exit_code, "said": str(error)}
    return told | {"seen": runtime.allgather(dict(seen))}


def base_of(strategy, changes=""):
    name = "base " + hashlib.sha256((strategy + changes).encode()).hexdigest()[:8]
    if not runtime.broadcast((root / name).exists()):
        train(name, strategy, eval(f"dict({changes})"), {})
        if runtime.rank == 0:
            marks = sorted(
                each.folder for each in candidates(root / name, [])
            )  # a worker that came late left one out
            for at, chosen in (("mid", marks[0]), ("end", [m for m in marks if int(m.name) >= 52][:1])):
                for mark in [chosen] if at == "mid" else chosen:
                    shutil.copytree(mark, root / f"{name} {at}" / "checkpoints" / mark.name)
        runtime.barrier()
    return name


if runtime.rank == 0:
    save_file(model().state_dict(), root / "start.safetensors")
found: dict[str, Any] = {}
for name, (strategy, changes, options, at, base) in json.loads(sys.argv[2]).items():
    came_from = base_of(*(base or [strategy]))
    given = {"resume": f"{root}/{came_from} {at}"} | eval(f"dict({options})")
    found[name] = train(name, strategy, eval(f"dict({changes})"), given)
if runtime.rank == 0:
    (root / "found.json").write_text(json.dumps(found, default=str))
