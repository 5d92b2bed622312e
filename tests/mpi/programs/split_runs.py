"""Runs that split a model, one after the other: `split_runs.py DIRECTORY [NAME ...]` (which: `splits.RUNS`), and
again from checkpoints of some of them."""

import os
import shutil
import signal
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.checkpoint.parts import FOLDER
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from tests.mpi import splits

directory = Path(sys.argv[1])
# ranks 0, 2, ... on one node, 1, 3, ... on another
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["SLURMD_NODENAME"] = f"node{rank % 2}"
only = sys.argv[2:]
runtime = start()


def nan_at_step_1(model, batch):
    loss = splits.loss(model, batch)
    return loss * float("nan") if runtime.step == 1 and runtime.rank == 1 else loss


signalled = []  # once: a second signal ends a run at once


def signal_at_step_0(model, batch):
    if runtime.step == 0 and runtime.rank == 1 and not signalled:
        signalled.append(batch)
        os.kill(os.getpid(), signal.SIGTERM)
    return splits.loss(model, batch)


LOSSES = {"nan": nan_at_step_1, "signal": signal_at_step_0}


def train(name, path, resume=None):
    strategy, changes = splits.RUNS[runtime.size][name]
    job = splits.character_job(directory) if name.startswith("charnn") else splits.deep_job()
    if "loss" in changes:
        changes = changes | {"loss": splits.loss if resume else LOSSES[changes["loss"]]}
    try:
        mt.train(splits.changed(job, **changes), strategy, run_dir=str(path), quiet=True, resume=resume)
    except AgreedError as error:
        if runtime.rank == 0:
            path.with_suffix(".refused").write_text(str(error))


def chosen(names):
    return [name for name in names if not only or name in only]


for name in chosen(splits.RUNS[runtime.size]):
    train(name, directory / name)
for name in chosen(splits.RESUMED[runtime.size]):
    resumed = directory / f"{name}-resumed"
    if runtime.rank == 0:
        second = sorted((directory / name / FOLDER).iterdir())[1]
        shutil.copytree(second, resumed / FOLDER / second.name)
    runtime.barrier()
    train(name, resumed, "auto")
for name in chosen(splits.INTERRUPTED[runtime.size]):
    if runtime.rank == 0:
        shutil.copy(directory / name / "result.json", directory / f"{name}.json")
    runtime.barrier()
    train(name, directory / name, "auto")
